"""Failures of libraries written in Rust: a panic is not an `Exception`, and must not end a thread."""


def is_failure(error: BaseException) -> bool:
    """Whether this is an Exception or a panic, as opposed to KeyboardInterrupt and the like.

    pyo3 creates a class PanicException for each library, which cannot be imported; hence the name.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"

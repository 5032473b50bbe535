"""Failures of libraries written in Rust: a panic of theirs is no `Exception`, and must not end a thread."""


def is_failure(error: BaseException) -> bool:
    """Whether it is an Exception or a panic; not what ends a thread or a process, as KeyboardInterrupt does.

    pyo3 makes a class PanicException for each library, which none of them lets one import.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"

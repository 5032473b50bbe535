"""Generated text for a terminal, which would execute the control characters in it."""

_NO_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text with control characters replaced, but for line breaks and tabs."""
    return text.translate(_NO_CONTROLS)

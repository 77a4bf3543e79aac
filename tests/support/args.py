"""Command lines as text."""


def args_of(text: str) -> list[str]:
    """Return the arguments of a command line without quotes."""
    return text.split()

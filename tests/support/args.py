"""Command lines as text."""

from collections.abc import Callable

Command = Callable[..., None]
"""The fixture ``command``."""


def args_of(*parts: object) -> list[str]:
    """Return the arguments of a command line; text is split at blanks, other parts are not."""
    return [
        word for part in parts for word in (part.split() if isinstance(part, str) else [str(part)])
    ]

"""Text for any terminal: no control characters, and substitutes for what its encoding lacks."""

import codecs

IN_ASCII = {
    "≥": ">=",
    "≤": "<=",
    "×": "x",
    "÷": "/",
    "–": "-",
    "−": "-",
    "…": "...",
    "·": ".",
    "µ": "u",
    "λ": "lambda ",
    "Δ": "change",
    "±": "+/-",
    "→": "->",
    "∞": "inf",
    "✓": "+",
    "✗": "x",
    "◆": "o",
    **dict(zip("─━═│╺╸", "-#=|# ", strict=True)),
    **dict.fromkeys("╭╮╰╯", "+"),
    **dict(zip("▁▂▃▄▅▆▇█", "_.,-=+*#", strict=True)),
    **{c: f"^{n}" for n, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
}
"""Replacements for characters that an encoding lacks; others become ``?``."""


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the terminal lacks; the error handler "in_ascii" of ``codecs``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(IN_ASCII.get(c, "?") for c in lacking), error.end


codecs.register_error("in_ascii", in_ascii)


def printable(text: str) -> str:
    """Return ``text`` without control characters, which could drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)

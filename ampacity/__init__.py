"""ampacity: the largest load an LLM endpoint carries continuously without violating its SLO.

From Python: ``ampacity.load("runs/x")``, ``compare``, ``sweep`` and ``predict`` (docs/python.md).
They are imported at their first use, so that ``import ampacity`` takes a few milliseconds; their
types are in ``__init__.pyi``.
"""

from importlib import import_module as _import_module

__version__ = "0.1.0"
_PUBLIC = {
    **dict.fromkeys(("Run", "load"), "ampacity.frames"),
    **dict.fromkeys(("CommandError", "compare", "predict", "sweep"), "ampacity.notebook"),
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ampacity' has no attribute {name!r}")
    return getattr(_import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

"""ampacity: the largest load an LLM endpoint carries continuously without violating its SLO.

From Python: ``ampacity.load("runs/x")``, ``compare``, ``sweep`` and ``predict`` (docs/python.md).
They are imported at their first use, so that ``import ampacity`` takes a few milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampacity.frames import Run, load
    from ampacity.notebook import CommandError, compare, predict, sweep

__version__ = "0.1.0"
__all__ = ["CommandError", "Run", "__version__", "compare", "load", "predict", "sweep"]
_FRAMES = ("Run", "load")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ampacity' has no attribute {name!r}")
    return getattr(import_module(f"ampacity.{'frames' if name in _FRAMES else 'notebook'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

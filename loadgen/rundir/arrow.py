"""Start Arrow without pandas in the processes of the command line."""

import sys
from importlib.abc import MetaPathFinder

import pyarrow as pa


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def convert_without_pandas() -> None:
    """Make Arrow's first conversion, in which it looks for pandas once, and let it find none.

    Importing pandas takes 0.4 s and 50 MB. Methods of Arrow that need it still import it.
    """
    if "pandas" not in sys.modules:
        finder = _NoPandas()
        sys.meta_path.insert(0, finder)
        try:
            pa.array([0])
        finally:
            sys.meta_path.remove(finder)


if "ampacity.cli" in sys.modules:  # another program may give its frames to Arrow
    convert_without_pandas()

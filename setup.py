"""Build the one compiled part; without a C compiler it is left out."""

import sys

from setuptools import Extension, setup

HOT_PATH = Extension(
    "ampacity.loadgen.receive._hot_path",
    ["loadgen/receive/_hot_path.c"],
    depends=["loadgen/receive/_read_handler.h", "loadgen/receive/_json_values.h"],
    optional=True,
)

setup(ext_modules=[HOT_PATH] if sys.platform == "linux" else [])

"""ampacity: the largest load an LLM endpoint carries continuously without violating its SLO."""

__version__ = "0.1.0"

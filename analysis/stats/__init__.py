"""Statistics without I/O: intervals, tests, bounds."""

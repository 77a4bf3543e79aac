"""The run directory: the records of requests, run.json, and how both are read and written."""

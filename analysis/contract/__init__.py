"""The typed contract of summary.json: a tree of frozen structs."""

"""Whole documents: the report of a run, a comparison, a gate, a profile."""

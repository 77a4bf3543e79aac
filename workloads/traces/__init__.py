"""Recorded load: traces and logs."""

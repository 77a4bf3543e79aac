"""Fit a profile to a log."""

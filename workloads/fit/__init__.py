"""From a log to a profile."""

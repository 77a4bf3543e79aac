"""A soak: its verdict over all windows, and what changed over the hours."""

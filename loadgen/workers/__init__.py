"""Worker processes: a stage is dealt out and its records are merged."""

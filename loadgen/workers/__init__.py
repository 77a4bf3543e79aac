"""Workers, as processes or on Ray: a stage is dealt out and its records are merged."""

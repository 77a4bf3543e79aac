"""From records to the samples of each metric, and their percentiles."""

"""Over the stages of a run: capacity, C_max, knee, the search's next load, fleet."""

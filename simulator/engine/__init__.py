"""Continuous batching as a discrete-event simulation, without I/O."""

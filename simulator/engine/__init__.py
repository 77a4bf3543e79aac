"""Continuous batching as a discrete-event core, without I/O."""

"""Set an experiment up and run its stages on an endpoint."""

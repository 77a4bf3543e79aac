"""The error of this room."""


class WorkloadError(ValueError):
    """A workload, trace or tokenizer that cannot be used; the message is one line that says how to mend it."""

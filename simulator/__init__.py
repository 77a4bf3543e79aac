"""A continuous-batching inference engine whose capacity is known, in virtual and in real time."""


class SimulatorError(ValueError):
    """A configuration or a request that the simulated engine cannot carry; one clear line."""

"""Engines and servers of the simulator, as its tests run them."""

"""Look at an endpoint before the load begins."""

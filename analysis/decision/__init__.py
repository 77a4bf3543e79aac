"""From a measured curve to a decision: does it fit, what limits it, what will it cost."""

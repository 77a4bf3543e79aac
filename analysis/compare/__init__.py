"""Compare: the scorecard of two or more runs, and which differences are real."""

"""Gate: a baseline, and candidates checked against it and against SLOs."""

"""Documents about one run, and the page they are made of; a profile, a plan."""

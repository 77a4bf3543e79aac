"""``python -m ampacity``."""

from ampacity.cli import main

main()

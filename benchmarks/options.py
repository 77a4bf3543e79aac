"""Command lines of the benchmarks."""

import argparse


def parser(doc: str | None, **options: float | str) -> argparse.ArgumentParser:
    """Return a parser described by ``doc``, with these options: name and default, of its type."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, default in options.items():
        made.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"default: {default}",
        )
    return made

"""docs/cli.md is what the commands' own help says."""

from pathlib import Path

from ampacity.cli.reference import reference

ROOT = Path(__file__).parents[2]


def test_the_reference_of_commands_is_current() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m ampacity.cli.reference > docs/cli.md"


def test_every_page_is_in_the_navigation() -> None:
    """And nothing else is: a page that nobody finds is no page."""
    import yaml

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        values = node.values() if isinstance(node, dict) else node
        assert not isinstance(values, str)
        return [page for value in values for page in pages(value)]

    there = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(config["nav"])) == sorted(there)

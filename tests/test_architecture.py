"""docs/architecture.md and the import contracts of pyproject.toml tell of the folders that there
are.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
PACKAGES = ("workloads", "loadgen", "analysis", "reports", "simulator")


def _floors(package: str) -> list[set[str]]:
    """Names of each layer of a package's contract, from the top."""
    found = [c for c in CONTRACTS if c.get("containers") == [f"ampacity.{package}"]]
    assert len(found) == 1, package
    return [set(layer.split(" | ")) for layer in found[0]["layers"]]


def _there(package: str) -> set[str]:
    """Modules and folders with modules at the top of a package."""
    modules = {p.stem for p in (ROOT / package).glob("*.py") if p.stem != "__init__"}
    return modules | {p.parent.name for p in (ROOT / package).glob("*/__init__.py")}


def test_the_contract_of_a_package_names_each_of_its_floors() -> None:
    for package in PACKAGES:
        assert set().union(*_floors(package)) == _there(package), package


def test_the_document_lists_the_floors_in_the_order_of_the_contract() -> None:
    for package in PACKAGES:
        section = re.search(rf"\*\*{package}\*\*, from the top:\n\n((?:- .*\n)+)", TEXT)
        assert section, package
        told = re.findall(r"- (\d+) `([\w/]+)`", section[1])
        wanted = {n: number for number, layer in enumerate(_floors(package), 1) for n in layer}
        assert {name.rstrip("/"): int(number) for number, name in told} == wanted, package
        assert [int(number) for number, _ in told] == sorted(wanted.values()), package


def test_each_path_that_the_document_names_exists() -> None:
    for path in re.findall(
        r"`((?:workloads|loadgen|analysis|reports|simulator|ampacity)/[\w/.]*)`", TEXT
    ):
        assert (ROOT / path).exists(), path
    for module, function in re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", TEXT):
        assert re.search(
            rf"^(async )?(def|class) {function}\b", (ROOT / module).read_text(), re.M
        ), function


def test_no_flat_folder_has_more_than_fifteen_modules() -> None:
    for package in (*PACKAGES, "ampacity"):
        for folder in {p.parent for p in (ROOT / package).rglob("*.py")}:
            name = str(folder.relative_to(ROOT))
            modules = [p for p in folder.glob("*.py") if p.stem != "__init__"]
            if not any(part in PACKAGES for part in folder.relative_to(ROOT).parts[1:]):
                assert len(modules) <= 15, name


def test_the_wheel_holds_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        parent.relative_to(ROOT)
        for package in (*PACKAGES, "ampacity")
        for parent in {p.parent for p in (ROOT / package).rglob("__init__.py")}
    }
    names = {
        ".".join(f.parts if f.parts[0] == "ampacity" else ("ampacity", *f.parts)) for f in folders
    }
    assert names == set(settings["packages"])

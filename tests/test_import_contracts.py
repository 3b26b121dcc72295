"""Every module has its place in an import contract: `make lint` checks the places, this checks that none is missing."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LAYERED = [contract for contract in LINTER["contracts"] if "containers" in contract]


def children_of(package: Path) -> list[str]:
    """Modules and packages of a package, without what its ``__init__`` holds."""
    modules = [path.stem for path in package.glob("*.py") if path.stem != "__init__"]
    return modules + [path.parent.name for path in package.glob("*/__init__.py")]


def test_every_package_with_modules_is_a_container() -> None:
    packages = [path.parent for root in LINTER["root_packages"] for path in (ROOT / root).rglob("__init__.py")]
    named = {name for contract in LAYERED for name in contract["containers"]}
    expected = {".".join(path.relative_to(ROOT).parts) for path in packages if len(children_of(path)) > 1}
    assert named == expected


def test_no_module_can_be_left_out_of_a_contract() -> None:
    assert all(contract["exhaustive"] and not contract.get("exhaustive_ignores") for contract in LAYERED)

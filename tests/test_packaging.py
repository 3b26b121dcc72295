"""What is installed is all that is here: tests import from the checkout, which would hide what a wheel lacks."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec", "draft_service", "target_service", "gateway", "tandem")


def test_a_wheel_holds_every_file_of_every_package(tmp_path: Path) -> None:
    sources = tmp_path / "sources"  # where no earlier build has left anything
    for package in PACKAGES:
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(sources)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == here - {"tandem/training/README.md"}

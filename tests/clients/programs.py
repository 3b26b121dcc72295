"""The programs in ``clients/cpp`` and ``clients/go``, compiled and run where compiler and libraries are there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
#: By name of the folder: its language, and what compiling needs.
PROGRAMS = {
    "cpp": ("C++", ("c++", "protoc", "grpc_cpp_plugin", "pkg-config")),
    "go": ("Go", ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")),
}


def missing(name: str) -> list[str]:
    """The tools that are not installed."""
    return [tool for tool in PROGRAMS[name][1] if shutil.which(tool) is None]


def run_program(name: str, address: str) -> str:
    """What the program prints, compiled by its ``build.sh`` and run against a gateway's gRPC address.

    Raises :class:`subprocess.CalledProcessError` where it does not compile or fails.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "protos").symlink_to(ROOT / "protos")
        copy = shutil.copytree(ROOT / "clients" / name, Path(folder) / "clients" / name, symlinks=True)
        subprocess.run(["sh", "build.sh"], cwd=copy, check=True, capture_output=True, text=True)
        done = subprocess.run(["./client", address], cwd=copy, check=True, capture_output=True, text=True)
    return done.stdout

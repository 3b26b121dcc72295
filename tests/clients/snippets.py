"""The programs in ``docs/clients.md``, compiled and run where the compiler and the libraries are there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
#: By language: the name of its block on the page, what compiling needs, and the program's file.
LANGUAGES = {
    "C++": ("cpp", ("c++", "protoc", "grpc_cpp_plugin", "pkg-config"), "main.cpp"),
    "Go": ("go", ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"), "main.go"),
}


def missing(language: str) -> list[str]:
    """The tools that are not installed."""
    _, tools, _ = LANGUAGES[language]
    return [tool for tool in tools if shutil.which(tool) is None]


def run_snippet(language: str, address: str) -> str:
    """What the program prints, compiled as the page says and run against a gateway's gRPC address.

    Raises :class:`subprocess.CalledProcessError` where it does not compile or fails.
    """
    block, _, name = LANGUAGES[language]
    section = PAGE.read_text().split(f"\n## {language}\n")[1].split("\n## ")[0]
    (program,) = re.findall(rf"```{block}\n(.*?)```", section, re.DOTALL)
    commands = re.findall(r"```\n(.*?)```", section, re.DOTALL)[0]
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(program)
        (Path(folder) / "protos").symlink_to(ROOT / "protos")
        subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True, text=True)
        done = subprocess.run(["./client", address], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout

"""The committed stubs are those of the protos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("specdec/v1")


def test_stubs_are_up_to_date(tmp_path):
    protos = sorted(str(path) for path in (ROOT / "protos" / FOLDER).glob("*.proto"))
    plugins = []
    for name in ("mypy", "mypy_grpc"):
        plugin = Path(sys.executable).parent / f"protoc-gen-{name}"
        assert plugin.exists(), "mypy-protobuf is missing: install the dev extra"
        plugins += [f"--plugin={plugin}", f"--{name}_out={tmp_path}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", f"--python_out={tmp_path}"]
    subprocess.run([*command, f"--grpc_python_out={tmp_path}", *plugins, *protos], check=True, capture_output=True)
    made = {path.name for path in (tmp_path / FOLDER).iterdir()}
    committed = {path.name for path in (ROOT / FOLDER).iterdir() if path.suffix in (".py", ".pyi")}
    assert committed - {"__init__.py"} == made
    for name in sorted(made):
        assert (tmp_path / FOLDER / name).read_text() == (ROOT / FOLDER / name).read_text(), f"regenerate {name}"


def test_every_field_and_message_has_a_comment():
    for path in (ROOT / "protos" / FOLDER).glob("*.proto"):
        previous = ""
        for line in path.read_text().splitlines():
            text = line.strip()
            if text.startswith(("message ", "enum ", "service ", "rpc ", "oneof ")) or text.endswith(";"):
                header = text.startswith(("syntax", "package", "import"))
                assert header or previous.startswith("//"), f"{path.name}: no comment above {text!r}"
            previous = text

"""Wrong checkpoints and settings end each command in one sentence, before torch or gRPC is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tandem.models
from specdec.errors import InvalidRequest, ModelNotSupported
from tandem import LLM

TARGET = str(Path(tandem.models.__path__[0]) / "python-12m")
_PROGRAM = """
import json, sys
from tandem.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
heavy = ("torch", "transformers", "grpc", "starlette", "numpy")
print(json.dumps([status, [name for name in heavy if name in sys.modules]]))
"""
OPEN = ("--host", "0.0.0.0", "--port", "0")


def refuse(*argv: str) -> str:
    """The last line on stderr of a command that must fail without loading anything heavy."""
    program = [sys.executable, "-c", _PROGRAM, *argv]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    status, heavy = json.loads(ran.stdout.splitlines()[-1])
    assert status in (1, 2), ran.stderr
    assert not heavy
    lines = ran.stderr.strip().splitlines()
    assert "Traceback" not in ran.stderr
    return lines[-1]


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return str(tmp_path)


@pytest.fixture
def truncated(tmp_path: Path) -> str:
    for name in ("config.json", "model.safetensors"):
        data = Path(TARGET, name).read_bytes()
        (tmp_path / name).write_bytes(data[: 2**20] if name.endswith("safetensors") else data)
    return str(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "{}"),
        ("serve", "--embedded", "{}"),
        ("serve", TARGET, "--speculative-config", '{{"model": "{}", "num_speculative_tokens": 2}}'),
        ("generate", "--model", "{}", "x"),
        ("target", "--model", "{}"),
        ("draft", "--model", "{}"),
        ("draft", "--method", "eagle3", "--model", "{}", "--target-model", TARGET),
    ],
    ids=" ".join,
)
def test_formats_that_are_refused(command: tuple[str, ...], gguf: str) -> None:
    line = refuse(*(part.format(gguf) for part in command))
    assert f"{gguf} holds GGUF weights (model-Q4_K_M.gguf) without config.json: give the path of the .gguf file" in line


@pytest.mark.parametrize("module", ["target_service", "draft_service"])
def test_damaged_files(module: str, truncated: str) -> None:
    command = {"target_service": "target", "draft_service": "draft"}[module]
    assert "model.safetensors is truncated or damaged (it has 1048576 bytes" in refuse(command, "--model", truncated)
    assert "is truncated or damaged" in refuse("serve", truncated)


@pytest.mark.parametrize(
    "command",
    [
        ("target", "--model", TARGET, *OPEN),
        ("draft", "--model", TARGET, *OPEN),
        ("draft", "--method", "suffix", *OPEN),
        ("gateway", *OPEN),
        ("serve", *OPEN),
    ],
    ids=lambda command: " ".join((command[0], command[2])),
)
def test_ports_that_anybody_could_use(command: tuple[str, ...]) -> None:
    assert "host is '0.0.0.0', which other machines can reach" in refuse(*command)


def test_the_offline_api(gguf: str) -> None:
    with pytest.raises(ModelNotSupported, match="holds GGUF weights"):
        LLM(gguf)
    with pytest.raises(ModelNotSupported, match="holds GGUF weights"):
        LLM(TARGET, speculative_config={"model": gguf, "num_speculative_tokens": 2})


def test_the_offline_api_names_truncated_files(truncated: str) -> None:
    with pytest.raises(InvalidRequest, match="is truncated or damaged"):
        LLM(truncated)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("target", "--model", TARGET), f"target: starting with {TARGET}"),
        (("draft", "--model", TARGET), f"draft: starting draft_model with {TARGET}"),
        (("draft", "--method", "suffix"), "draft: starting suffix"),
        (("gateway", "--targets", "127.0.0.1:1"), "gateway: starting for 127.0.0.1:1"),
        (
            ("serve", "--port", "0", "--grpc-port", "0"),
            "starting target, draft, gateway: python-12m, drafted by python-1m",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_service_says_what_it_starts_before_it_imports_anything_heavy(command: tuple[str, ...], line: str) -> None:
    """Heavy modules cannot be imported in this process: the line comes before the first of them is missed."""
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'grpc', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
        "from tandem.cli.main import main; main(sys.argv[1:])"
    )
    ran = subprocess.Popen([sys.executable, "-c", program, *command], stderr=subprocess.PIPE, text=True)
    assert ran.stderr is not None
    try:
        assert line in ran.stderr.readline()
    finally:
        ran.kill()
        ran.communicate()

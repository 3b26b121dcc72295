"""The target service as a process."""

import json
import signal
import subprocess
import sys

import pytest

from specdec.flags import Parser
from specdec.settings import SchedulerSettings, ServerSettings
from target_service.main import add_arguments, main, settings_of


def test_the_process_serves_and_stops(checkpoint):
    command = [sys.executable, "-m", "target_service", "--model", checkpoint, "--num-threads", "1"]
    command += ["--device", "cpu", "--kv-cache-memory-bytes", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = json.loads(process.stdout.readline())
        assert (line["service"], line["pid"]) == ("target", process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""


def test_a_wrong_flag_is_named(capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["--model", "x", "--block-size", "0"])
    assert wrong.value.code == 2
    assert "block_size is 0" in capsys.readouterr().err


def test_defaults_are_those_of_the_settings():
    parser = Parser()
    add_arguments(parser)
    target, server = settings_of(
        parser.parse_args(["--model", "m", "--max-num-seqs", "7", "--verification", "coupled"])
    )
    assert target.scheduler == SchedulerSettings(max_num_seqs=7)
    assert server == ServerSettings()
    assert target.verification == "coupled"

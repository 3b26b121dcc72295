"""The supervisor against small real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specdec.errors import InvalidRequest, Unavailable
from tandem.launcher.supervisor import ServiceSpec, Supervisor
from tests.until import until

STUB = """
import signal, sys, time, pathlib
ready, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
if behaviour == "fail":
    print("the weights are missing")
    sys.exit(3)
if behaviour == "refuse":
    print("no such folder")
    sys.exit(2)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("draining"), sys.exit(0)))
print("hello from", behaviour)
if behaviour == "late":
    time.sleep(60)
ready.write_text("yes")
print('{"event": "ready", "port": 1}')
while True:
    time.sleep(0.05)
"""


class Stubs:
    """Makes stub services and keeps what they log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[tuple[str, str]] = []
        (folder / "stub_service.py").write_text(STUB)

    def log(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def service(self, name: str, behaviour: str = "normal", *, polled: bool = False) -> ServiceSpec:
        mark = self.folder / name

        async def is_ready() -> bool:
            return mark.exists()

        return ServiceSpec(
            name=name,
            module="stub_service",
            arguments=(str(mark), behaviour),
            environment={"PYTHONPATH": f"{self.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            is_ready=is_ready if polled else None,
        )


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


async def test_starts_forwards_logs_and_stops_in_reverse_order(stubs: Stubs) -> None:
    services = [stubs.service("a"), stubs.service("b", polled=True)]
    async with Supervisor(services, drain_s=5, log=stubs.log) as supervisor:
        pids = supervisor.pids()
        assert set(pids) == {"a", "b"}
    assert ("a", "hello from normal") in stubs.lines
    drained = [name for name, line in stubs.lines if line == "draining"]
    assert drained == ["b", "a"]
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


async def test_a_child_that_dies_is_restarted_and_reported(stubs: Stubs) -> None:
    async with Supervisor([stubs.service("a")], drain_s=5, log=stubs.log) as supervisor:
        first = supervisor.pids()["a"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pids().get("a", first) != first)
        await until(lambda: ("tandem", "a is back") in stubs.lines)
        assert ("tandem", "a was ended by SIGKILL; starting it again") in stubs.lines
        assert supervisor.children["a"].num_restarts == 1
        os.kill(supervisor.pids()["a"], signal.SIGKILL)
        await until(lambda: supervisor.children["a"].num_restarts == 2)
        assert ("tandem", "a was ended by SIGKILL; starting it again in 0.5 s") in stubs.lines


async def test_a_failed_start_names_the_service_and_its_last_words(stubs: Stubs) -> None:
    supervisor = Supervisor([stubs.service("a"), stubs.service("b", "fail")], drain_s=5, log=stubs.log)
    with pytest.raises(Unavailable, match=r"^b exited with code 3 before it was ready: the weights are missing$"):
        async with supervisor:
            pass
    assert supervisor.pids() == {}


async def test_a_service_that_was_called_wrongly_is_a_mistake_of_the_caller(stubs: Stubs) -> None:
    supervisor = Supervisor([stubs.service("a", "refuse")], drain_s=5, log=stubs.log)
    with pytest.raises(InvalidRequest, match=r"^a exited with code 2 before it was ready: no such folder$"):
        async with supervisor:
            pass


async def test_startup_timeout_names_who_is_late(stubs: Stubs) -> None:
    supervisor = Supervisor([stubs.service("a", "late")], drain_s=1, startup_timeout_s=0.5, log=stubs.log)
    with pytest.raises(Unavailable, match=r"not ready after 0\.5 s: a"):
        await supervisor.__aenter__()
    assert supervisor.pids() == {}


async def test_a_child_that_ignores_sigterm_is_killed(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.launcher.supervisor._QUIET_STOP_S", 0.3)
    async with Supervisor([stubs.service("a", "stubborn")], drain_s=0.3, log=stubs.log) as supervisor:
        pid = supervisor.pids()["a"]
    assert not psutil.pid_exists(pid)
    assert any("did not stop within" in line for _, line in stubs.lines)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is dead")
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_children_do_not_outlive_a_killed_launcher(stubs: Stubs, tmp_path: Path, stopped: bool) -> None:
    script = tmp_path / "launcher.py"
    service = stubs.service("a")
    script.write_text(
        f"""
import asyncio
from tandem.launcher.supervisor import ServiceSpec, Supervisor
async def main():
    service = ServiceSpec(name="a", module="stub_service", arguments=({str(tmp_path / "a")!r}, "normal"))
    async with Supervisor([service], drain_s=5) as supervisor:
        print(supervisor.pids()["a"], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    )
    environment = {**os.environ, **service.environment}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert psutil.pid_exists(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        launcher.kill()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its launcher"
        time.sleep(0.05)

"""Split targets as processes: ranks that are killed or hang, other launchers, drain (`make test-tp`)."""

import signal
import subprocess
import sys
import time

import grpc
import httpx
import psutil
import pytest

from specdec.v1.target_service_pb2_grpc import TargetServiceStub
from specdec.v1.types_pb2 import GetModelInfoRequest
from tandem.launcher.deployment import free_port
from tests.e2e.servers import (
    ROOT,
    Stack,
    collect,
    draft_process,
    ids_of,
    request_of,
    target_process,
)

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

PROMPTS = [("def add(a, b):\n", 0.0, None), ("class Stack:\n", 0.9, 11)]


@pytest.fixture(scope="module", autouse=True)
def forked_processes():
    """None: ranks are processes of their own from the start."""


def ranks_of(pid):
    """The processes that follow the rank 0 that has this id."""
    return psutil.Process(pid).children()


@pytest.fixture(scope="module")
def replicas():
    targets = [target_process("-tp", "2") for _ in range(2)]
    running = Stack.start(targets, [draft_process()], "--verification", "coupled")
    yield running
    running.close()


@pytest.mark.parametrize(("prompt", "temperature", "seed"), PROMPTS)
def test_a_session_moves_when_a_rank_dies(replicas, prompt, temperature, seed):
    request = request_of(prompt, max_tokens=120, temperature=temperature, seed=seed)
    undisturbed = collect(replicas, request)
    assert undisturbed[-1].speculation.num_accepted_draft_tokens > 0

    def kill_a_rank():
        target = next(
            target for index, target in enumerate(replicas.targets) if replicas.load_of_target(index).open_sessions
        )
        (rank,) = ranks_of(target.pid)
        rank.kill()

    assert ids_of(collect(replicas, request, acts={30: kill_a_rank})) == ids_of(undisturbed)
    (dead,) = [target for target in replicas.targets if not target.is_running]
    assert dead.wait() == 1
    assert any("rank 1 was ended by SIGKILL; this target ends" in line for line in dead.log)
    dead.restart_on_same_port()


def test_a_rank_that_hangs_ends_the_target():
    target = target_process("-tp", "2", "--tensor-parallel-timeout-s", "2").start()
    (rank,) = ranks_of(target.pid)
    time.sleep(3)  # longer than the limit, without anything to do
    assert target.is_running
    try:
        rank.suspend()
        assert target.wait() == 1
    finally:
        rank.kill()
    assert any("a rank has not answered for 2 s; this target ends" in line for line in target.log)


def test_ranks_run_the_same_path(tmp_path, monkeypatch):
    """Rank 1 has no compiler, so rank 0 does without the kernels that it has."""
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    targets = [target_process("-tp", "2") for _ in range(2)]
    try:
        for rank, target in reversed(list(enumerate(targets))):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            with monkeypatch.context() as own:
                if rank:
                    own.setenv("CXX", "/bin/false")
                    own.setenv("XDG_CACHE_HOME", str(tmp_path))
                target.launch()
        address = targets[0].wait_until_ready().address
        with grpc.insecure_channel(address) as channel:
            answer = TargetServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=10)
        assert answer.model.execution == "torch attention, 2 ranks"
    finally:
        for target in targets:
            target.kill()
    assert any("ranks exchange data through gloo" in line for line in targets[1].log)


def test_ranks_end_with_rank_0():
    target = target_process("-tp", "2").start()
    (rank,) = ranks_of(target.pid)
    target.kill()
    psutil.wait_procs([rank], timeout=10)
    assert not rank.is_running()


def test_a_split_target_drains_on_sigterm():
    target = target_process("-tp", "2").start()
    (rank,) = ranks_of(target.pid)
    target.stop()  # status 0
    assert not rank.is_running()


def test_torchrun():
    torchrun = ["--standalone", "--nproc-per-node", "2", "-m", "target_service"]
    target = target_process("-tp", "2")
    target.command = [*target.command[:2], "torch.distributed.run", *torchrun, *target.command[3:]]
    stack = Stack.start([target])
    try:
        assert len(ids_of(collect(stack, request_of("import os\n", max_tokens=20)))) == 20
    finally:
        target.signal(signal.SIGTERM)
        target.wait()
        stack.close()


def test_serve_starts_the_ranks_and_starts_them_again():
    command = [sys.executable, "-m", "tandem", "serve", "python-12m", "-tp", "2", "--num-threads", "1"]
    # A busy machine takes long to start the ranks again.
    flags = ["--port", "0", "--grpc-port", "0", "--target-wait-s", "100"]
    log = []
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as served:
        try:
            for line in served.stdout:
                log.append(line)
                if line.startswith("ready: "):
                    break
            url = line.split()[1].rstrip(",") + "/completions"
            body = {"prompt": "def add(a, b):\n", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            before = httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"]
            (rank,) = [each for each in psutil.Process(served.pid).children(recursive=True) if is_rank(each)]
            rank.kill()
            assert httpx.post(url, json=body, timeout=120).json()["choices"][0]["text"] == before
            served.terminate()
            log += served.stdout
            assert served.wait(30) == 0
        finally:
            served.kill()
    text = "".join(log)
    assert "rank 1 was ended by SIGKILL; this target ends" in text
    assert "target exited with code 1; starting it again" in text


def is_rank(process):
    return "TANDEM_STORE_PORT" in process.environ()

"""The simulated limit of drafts at a distance, and the line that stands for it."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from benchmarks.never_wait import round_speed, stream_speed


def runs_of(acceptance: float) -> list[int]:
    """Drafted tokens that are right in a row, each one with this probability."""
    rng, runs = random.Random(1), []
    for _ in range(20_000):
        run = 0
        while rng.random() < acceptance:
            run += 1
        runs.append(run)
    return runs


@pytest.mark.parametrize(("rtt", "speed"), [(0.5, 2.34), (1.0, 1.94), (2.0, 1.62), (5.0, 1.22), (10.0, 1.05)])
def test_a_stream_at_a_distance(rtt: float, speed: float) -> None:
    """Another program's simulation of the same model, at acceptance 0.8, 8 tokens a step and 10 drafted in one."""
    assert stream_speed(runs_of(0.8), rtt, 8, 10.0) == pytest.approx(speed, abs=0.03)


def test_rounds_at_a_distance() -> None:
    """The closed form: (1 - α^(k+1)) / (1 - α) tokens a round."""
    expected = (1 - 0.8**5) / (1 - 0.8) / (1 + 2.0 + 0.4)
    assert round_speed(runs_of(0.8), 2.0, 4, 10.0) == pytest.approx(expected, rel=0.01)


def test_waiting_wins_near_and_loses_far() -> None:
    runs = runs_of(0.8)
    assert round_speed(runs, 0.01, 4, 100.0) > stream_speed(runs, 0.01, 4, 100.0)
    assert round_speed(runs, 2.0, 4, 100.0) < stream_speed(runs, 2.0, 4, 100.0)


#: A server and a client of one process over the line: the time of an exchange, and the bytes of many. A packet of
#: another connection, which takes half a minute, holds up none of them.
EXCHANGE = """
import json, socket, threading, time
from benchmarks import far_line
far_line.enter()
line = far_line.FarLine()
server = socket.create_server((far_line.NEAR, 0))
line.set(20.0, 0.0, float({loss}), server.getsockname()[1])
def echo(connection):
    while data := connection.recv(1000):
        connection.sendall(data)
def accept():  # in any order: the end of a handshake may be lost
    while True:
        threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()
threading.Thread(target=accept, daemon=True).start()
client = socket.create_connection((far_line.FAR, server.getsockname()[1]))
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
other = socket.create_connection((far_line.FAR, server.getsockname()[1]))
line.set(60_000.0, 0.0, 0.0, server.getsockname()[1])
other.sendall(b"late")
time.sleep(0.1)
line.set(20.0, 0.0, float({loss}), server.getsockname()[1])
times = []
for i in range({num}):
    if times and times[-1] > {enough_s}:
        break
    start = time.perf_counter()
    client.sendall(bytes([i]) * 100)
    assert client.recv(1000) == bytes([i]) * 100
    times.append(time.perf_counter() - start)
print(json.dumps([sorted(times), line.num_bytes]))
"""


def exchange(loss: float, num: int, enough_s: float = 9.0) -> tuple[list[float], list[int]]:
    """The last exchange is one that takes ``enough_s``."""
    program = EXCHANGE.format(loss=loss, num=num, enough_s=enough_s)
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, timeout=60)
    times, num_bytes = json.loads(done.stdout)
    return times, num_bytes


def test_the_line_delays_and_counts() -> None:
    times, (to_port, from_port) = exchange(0.0, 20)
    assert 0.02 <= times[0] < 0.2  # the machine may be busy
    assert to_port >= 20 * 140
    assert from_port >= 20 * 140


def test_what_the_line_loses_is_sent_again() -> None:
    """Every byte arrives, some a timeout of TCP later."""
    times, _ = exchange(0.1, 200, 0.15)
    assert times[-1] > 0.15
    assert times[0] >= 0.02

"""The echo servers of the benchmark."""

import multiprocessing
import threading

from benchmarks import echo


def test_a_framed_echo_goes_on_after_a_mebibyte(tmp_path, monkeypatch):
    monkeypatch.setattr(echo, "MESSAGE", b"x" * 100_000)
    serve, ask = echo.TRANSPORTS["frames"]
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    server = spawn.Process(target=serve, args=(str(tmp_path / "s"), ready), daemon=True)
    server.start()
    late = threading.Timer(30, server.kill)
    late.start()
    try:
        assert ready.wait(60)
        assert len(ask(str(tmp_path / "s"), 30)) == 30
        assert server.is_alive()
    finally:
        late.cancel()
        server.kill()
        server.join()

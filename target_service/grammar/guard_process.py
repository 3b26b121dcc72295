"""The process that compiles grammars first, each in a copy of itself that the kernel ends after its CPU seconds.

Started by :class:`target_service.grammar.guard.CompileGuard` with the number of a socket. Standard input has the
tokenizer; each message of the socket brings another socket, from which a copy reads a grammar. The answer is one byte:
how the copy ended, as a return code of :mod:`subprocess`, modulo 256.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

from llguidance import LLMatcher, LLTokenizer

from target_service.grammar.bounds import LIMITS, MAX_COMPILE_S, STACK_BYTES


def main() -> None:
    """Serve until the other end of the socket is closed."""
    text, eos_token_ids = json.load(sys.stdin)
    tokenizer = LLTokenizer(text, eos_token=eos_token_ids or None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the target, which drains
    threading.stack_size(STACK_BYTES)
    connections: dict[int, socket.socket] = {}
    endings, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    with socket.socket(fileno=int(sys.argv[1])) as requests, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(endings, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if requests in ready:
                _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
                if not descriptors:
                    return
                connection = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if pid == 0:
                    _run_copy(tokenizer, connection)
                connections[pid] = connection
            if endings in ready:
                endings.recv(4096)
                _answer(connections)


def _answer(connections: dict[int, socket.socket]) -> None:
    """Tell those whose copies have ended, by process id, how."""
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with connections.pop(pid) as connection, suppress(OSError):  # who asked may be gone
            connection.sendall(bytes([os.waitstatus_to_exitcode(status) % 256]))


def _run_copy(tokenizer: LLTokenizer, connection: socket.socket) -> NoReturn:
    """Compile one grammar and end, whatever happens: the rest of :func:`main` is for the process copied."""
    status = os.EX_TEMPFAIL
    try:
        status = _compile(tokenizer, connection)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _compile(tokenizer: LLTokenizer, connection: socket.socket) -> int:
    """The exit status: 0 where the grammar was compiled, or has an error; EX_TEMPFAIL where memory is short.

    Raises:
        RuntimeError: there is no room for another thread.
    """
    signal.set_wakeup_fd(-1)
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
    status = 1

    def compile_grammar() -> None:
        nonlocal status
        try:
            with connection.makefile("r", encoding="utf-8") as file:
                LLMatcher(tokenizer, file.read(), log_level=0, limits=LIMITS)
            status = 0
        except MemoryError:
            status = os.EX_TEMPFAIL

    thread = threading.Thread(target=compile_grammar)
    thread.start()
    thread.join()
    return status


if __name__ == "__main__":
    main()

"""Finds grammars that take too long to compile, or end a process: a thread cannot be ended, a process can."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Final

from specdec.errors import Overloaded, Unavailable
from target_service.grammar.bounds import MAX_COMPILE_S
from target_service.grammar.tokenizer import TokenizerText

#: How the compiler fails by itself. Other signals come from outside.
_CRASHES: Final = frozenset((signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV))


def refusal_of(code: int) -> str:
    """Why a grammar is refused if the process that compiled it ended with ``code``: an exit status, or the negative
    number of a signal. Empty for 0.

    Raises:
        Overloaded: it was killed, or had no memory, which may not be due to the grammar.
    """
    if code == 0:
        return ""
    if code == -signal.SIGPROF:
        return f"it takes more than {MAX_COMPILE_S} s to compile; simplify it"
    how = f"exit status {code}"
    if code < 0:
        how = next((each.name for each in _CRASHES if each == -code), f"signal {-code}")
    if code == os.EX_TEMPFAIL or (code < 0 and -code not in _CRASHES):
        raise Overloaded(
            f"the process that compiled the grammar was killed or found no memory ({how}); memory may be short; try"
            " again later"
        )
    return f"it ends the process that compiles it ({how}); simplify it"


class CompileGuard:
    """Owns the process; used from one event loop."""

    def __init__(self, tokenizer: TokenizerText) -> None:
        """Start the process and send it the tokenizer: a second where the vocabulary is large."""
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "target_service.grammar.guard_process", str(theirs.fileno())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        assert self._process.stdin is not None
        with self._process.stdin as file:
            file.write(json.dumps([tokenizer.json, tokenizer.eos_token_ids]).encode())

    async def refusal(self, grammar: str) -> str:
        """Why a grammar must not be compiled; empty where it compiles, or shows an error, within its bounds.

        Raises:
            Overloaded: what compiled the grammar was killed, or had no memory.
            Unavailable: the process has ended, or cannot be asked.
        """
        try:
            answer = await self._ask(grammar.encode())
        except OSError as error:
            raise Unavailable(f"the process that checks grammars cannot be asked ({error}); try again") from error
        if not answer:
            raise Unavailable("the process that checks grammars has ended; try again")
        return refusal_of(int.from_bytes(answer, signed=True))

    async def _ask(self, grammar: bytes) -> bytes:
        """The byte of its answer, or none."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._requests, [b"\0"], [theirs.fileno()])
            ours.setblocking(False)
            with suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read everything
                await loop.sock_sendall(ours, grammar)
                ours.shutdown(socket.SHUT_WR)
            return await loop.sock_recv(ours, 1)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process; grammars that it compiles end by themselves."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

"""Which sequence of an engine's batch is which session of the draft service, where the engine gives no names."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from specdec.settings.option import require
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import types_pb2
from tandem_integrations.settings import RemoteDraftSettings
from tandem_integrations.step_client import Lost, StepClient

logger = logging.getLogger(__name__)

#: Last tokens by which a sequence is known again, with its length. Two sequences that agree in both may be mixed up,
#: which costs their drafts and nothing else. 128 bytes to compare, and samples of one prompt differ long before.
TAIL: Final = 32
#: Steps after which a sequence that is in no batch has ended: an engine leaves a running one out for a few steps at
#: most, and until then the session of one that ended holds its cache.
MAX_ABSENT_STEPS: Final = 32
#: Steps before a session that the draft service refused or lost is opened again. Opening sends the whole text, so it
#: must be rare while the service is full; 64 steps are a second or two.
RETRY_STEPS: Final = 64

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class BatchRow:
    """One sequence of the batch."""

    #: All committed tokens, the new ones included: int32 [length].
    token_ids: Tokens
    #: How many of them this step committed; 0 while the prompt is being computed.
    num_new: int


@dataclass(slots=True)
class _RemoteSession:
    name: str
    length: int
    #: Length up to which the service has reserved cache.
    end: int
    last_step: int
    #: Step from which a session that was lost may be opened again; None: it is open.
    retry_at: int | None = None


class RemoteSessions:
    """Sends each step's commits and gets the drafts. A session is found again by its last tokens before the step."""

    def __init__(self, settings: RemoteDraftSettings, num_speculative_tokens: int, max_model_len: int) -> None:
        """Connects at the first step.

        Raises:
            InvalidRequest: ``reserve_tokens`` is too small, or a file of TLS cannot be used.
        """
        require(
            settings.reserve_tokens > num_speculative_tokens,
            "reserve_tokens",
            f"reserve_tokens is {settings.reserve_tokens}; it must be above num_speculative_tokens, which is"
            f" {num_speculative_tokens}, or every step would open its sessions again",
        )
        self._settings = settings
        self._num_tokens = num_speculative_tokens
        self._max_model_len = max_model_len
        self._client = StepClient(settings)
        self._sessions: dict[tuple[int, bytes], list[_RemoteSession]] = {}
        self._step = 0

    def draft(self, rows: Sequence[BatchRow]) -> list[list[int]]:
        """Drafted tokens after each row, ``num_speculative_tokens`` at most; none where none came in time."""
        self._step += 1
        has_new = any(row.num_new for row in rows)
        if not (self._client.connect() if has_new else self._client.is_connected):
            return [[] for _ in rows]
        request = pb.DraftStepRequest()
        names = [self._advance(row, request) if row.num_new else None for row in rows]
        request.close.extend(self._forget_absent())
        try:
            response = self._client.step(request) if request.ByteSize() else None
        except Lost:
            self._sessions.clear()
            response = None
        if response is None:
            return [[] for _ in rows]
        self._note_lost({lost.session_id: lost.cause for lost in response.lost})
        drafts = {each.session_id: list(each.proposal.token_ids) for each in response.proposals}
        return [drafts.get(name, [])[: self._num_tokens] if name is not None else [] for name in names]

    def close(self) -> None:
        """End all sessions."""
        self._client.close()

    def _advance(self, row: BatchRow, request: pb.DraftStepRequest) -> str | None:
        """Add a row's commit to the request; the name of its session, if it has one now."""
        length = len(row.token_ids)
        num_tokens = min(self._num_tokens, self._max_model_len - length - 1)
        if num_tokens <= 0:
            return None
        session = self._find(row)
        if session is None or (session.retry_at is not None and self._step >= session.retry_at):
            session = self._open(row, request)
        elif session.retry_at is not None:
            self._put(session, row)
            return None
        elif length + num_tokens > session.end:
            request.close.append(session.name)
            session = self._open(row, request)
        else:
            new = row.token_ids[session.length :]
            self._ask(request, session, session.length, new, num_tokens)
            self._put(session, row)
            return session.name
        self._ask(request, session, length, row.token_ids[:0], num_tokens)
        self._put(session, row)
        return session.name

    def _ask(
        self, request: pb.DraftStepRequest, session: _RemoteSession, base_len: int, new: Tokens, num_tokens: int
    ) -> None:
        advance = pb.Advance(
            epoch=1,
            base_len=base_len,
            token_ids=new.tolist(),
            num_draft_tokens=num_tokens,
            num_ahead_proposals=self._settings.num_ahead_proposals,
        )
        request.advances.add(session_id=session.name, advance=advance)

    def _open(self, row: BatchRow, request: pb.DraftStepRequest) -> _RemoteSession:
        """A session whose drafts are the likeliest tokens: the engine takes a draft for certain, not for a sample."""
        length = len(row.token_ids)
        reserve = min(self._settings.reserve_tokens, self._max_model_len - length)
        session = _RemoteSession(uuid.uuid4().hex, length, length + reserve, self._step)
        request.open.add(
            session_id=session.name,
            epoch=1,
            token_ids=row.token_ids.tolist(),
            prompt_len=length,
            sampling=types_pb2.SamplingParams(temperature=0.0),
            verification=types_pb2.VERIFICATION_RULE_COUPLED,
            max_tokens=reserve,
            num_speculative_tokens=self._num_tokens,
        )
        return session

    def _find(self, row: BatchRow) -> _RemoteSession | None:
        """The session that had this row's tokens before the step, taken out of the table."""
        before = row.token_ids[: len(row.token_ids) - row.num_new]
        key = _key(before)
        found = self._sessions.get(key)
        if not found:
            return None
        session = found.pop()
        if not found:
            del self._sessions[key]
        return session

    def _put(self, session: _RemoteSession, row: BatchRow) -> None:
        session.length, session.last_step = len(row.token_ids), self._step
        self._sessions.setdefault(_key(row.token_ids), []).append(session)

    def _forget_absent(self) -> list[str]:
        """The names of the open sessions whose sequence is in no batch any more."""
        if self._step % MAX_ABSENT_STEPS:
            return []
        ended = []
        for key, sessions in list(self._sessions.items()):
            absent = [each for each in sessions if self._step - each.last_step >= MAX_ABSENT_STEPS]
            ended += [each.name for each in absent if each.retry_at is None]
            if kept := [each for each in sessions if each not in absent]:
                self._sessions[key] = kept
            else:
                del self._sessions[key]
        return ended

    def _note_lost(self, causes: dict[str, str]) -> None:
        if not causes:
            return
        for sessions in self._sessions.values():
            for session in sessions:
                if session.name in causes:
                    session.retry_at = self._step + RETRY_STEPS
                    logger.warning("a sequence has no draft for %d steps: %s", RETRY_STEPS, causes[session.name])


def _key(token_ids: Tokens) -> tuple[int, bytes]:
    return len(token_ids), token_ids[-TAIL:].tobytes()

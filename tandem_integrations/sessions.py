"""The sequences of an engine's batches as sessions of the draft service."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from specdec.settings.option import require
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import types_pb2
from tandem_integrations.settings import RemoteDraftSettings
from tandem_integrations.step_client import Lost, StepClient

logger = logging.getLogger(__name__)

#: Last tokens by which a sequence without a name is known again, with its length. Two sequences that agree in both may
#: be mixed up, which costs their drafts and nothing else. 128 bytes to compare, and samples of one prompt differ long
#: before.
TAIL: Final = 32
#: Steps after which a sequence that is in no batch has ended: an engine leaves a running one out for a few steps at
#: most, and until then the session of one that ended holds its cache.
MAX_ABSENT_STEPS: Final = 32
#: Steps before a session that the draft service refused is opened again. Opening sends the whole text, so it must be
#: rare while the service is full; 64 steps are a second or two. One that had drafted before it was lost is opened again
#: at once: the service ends sessions that idle.
RETRY_STEPS: Final = 64

Tokens = npt.NDArray[np.int32]


class EngineRow(Protocol):
    """One sequence of the batch."""

    @property
    def length(self) -> int:
        """Committed tokens, the new ones included."""
        ...

    @property
    def num_new(self) -> int:
        """How many of them this step committed; 0 while the prompt is being computed."""
        ...

    @property
    def keys(self) -> tuple[Hashable, Hashable]:
        """What the sequence was known by after the step before, and what it is known by now."""
        ...

    def tokens(self, start: int) -> list[int]:
        """The committed tokens from ``start`` on."""
        ...


@dataclass(slots=True)
class BatchRow:
    """A sequence of an engine that gives no names: it is found again by its length and last tokens."""

    #: All committed tokens, the new ones included: int32 [length].
    token_ids: Tokens
    num_new: int

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.token_ids)

    @property
    def keys(self) -> tuple[Hashable, Hashable]:
        """Those of the text before the step and after it."""
        return _key(self.token_ids[: self.length - self.num_new]), _key(self.token_ids)

    def tokens(self, start: int) -> list[int]:
        """The committed tokens from ``start`` on."""
        return list(map(int, self.token_ids[start:]))


@dataclass(frozen=True, slots=True)
class RowDraft:
    """The drafted tokens after one row; none where none came in time."""

    token_ids: Sequence[int] = ()
    #: Of a tree: the index of the token that each one follows, which stands before it, or -1; empty: a chain.
    parents: Sequence[int] = ()

    def chain(self) -> list[int]:
        """The tokens of a chain, or of the best path of a tree: of siblings the first is the best."""
        path, last = [], -1
        for index, token_id in enumerate(self.token_ids):
            if not self.parents or self.parents[index] == last:
                path.append(token_id)
                last = index
        return path


@dataclass(slots=True)
class _RemoteSession:
    name: str
    length: int
    #: Length up to which the service drafts.
    end: int
    last_step: int
    #: Step from which a session that was lost may be opened again; None: it is open.
    retry_at: int | None = None
    #: Whether it has brought a proposal.
    has_drafted: bool = False


class RemoteSessions:
    """Sends each step's commits and gets the drafts."""

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
        self._sessions: dict[Hashable, list[_RemoteSession]] = {}
        self._step = 0

    def draft(self, rows: Sequence[EngineRow]) -> list[RowDraft]:
        """What was drafted after each row, ``num_speculative_tokens`` at most; nothing where nothing came in time."""
        self._step += 1
        has_new = any(row.num_new for row in rows)
        if not (self._client.connect() if has_new else self._client.is_connected):
            return [RowDraft() for _ in rows]
        request = pb.DraftStepRequest()
        asked = [self._advance(row, request) if row.num_new else None for row in rows]
        request.close.extend(self._forget_absent())
        try:
            response = self._client.step(request) if request.ByteSize() else None
        except Lost:
            self._sessions.clear()
            response = None
        if response is None:
            return [RowDraft() for _ in rows]
        self._note_lost({lost.session_id: lost.cause for lost in response.lost})
        end = self._num_tokens
        drafts = {
            each.session_id: RowDraft(each.proposal.token_ids[:end], each.proposal.parents[:end])
            for each in response.proposals
        }
        for session in asked:
            if session is not None and session.name in drafts:
                session.has_drafted = True
        return [RowDraft() if session is None else drafts.get(session.name, RowDraft()) for session in asked]

    def close(self) -> None:
        """End all sessions."""
        self._client.close()

    def _advance(self, row: EngineRow, request: pb.DraftStepRequest) -> _RemoteSession | None:
        """Add a row's commit to the request; its session, if it has one now."""
        num_tokens = min(self._num_tokens, self._max_model_len - row.length - 1)
        if num_tokens <= 0:
            return None
        before, after = row.keys
        session = self._take(before)
        if session is not None and session.retry_at is not None and self._step < session.retry_at:
            self._put(after, session, row)
            return None
        start = row.length if session is None else session.length
        if (
            session is None
            or session.retry_at is not None
            or start > row.length
            or row.length + num_tokens > session.end
        ):
            if session is not None and session.retry_at is None:
                request.close.append(session.name)
            session, start = self._open(row, request), row.length
        advance = pb.Advance(
            epoch=1,
            base_len=start,
            token_ids=row.tokens(start),
            num_draft_tokens=num_tokens,
        )
        request.advances.add(session_id=session.name, advance=advance)
        self._put(after, session, row)
        return session

    def _open(self, row: EngineRow, request: pb.DraftStepRequest) -> _RemoteSession:
        """A session whose drafts are the likeliest tokens: the engine takes a draft for certain, not for a sample."""
        reserve = min(self._settings.reserve_tokens, self._max_model_len - row.length)
        session = _RemoteSession(uuid.uuid4().hex, row.length, row.length + reserve, self._step)
        request.open.add(
            session_id=session.name,
            epoch=1,
            token_ids=row.tokens(0),
            prompt_len=row.length,
            sampling=types_pb2.SamplingParams(temperature=0.0),
            verification=types_pb2.VERIFICATION_RULE_COUPLED,
            max_tokens=reserve,
            num_speculative_tokens=self._num_tokens,
        )
        return session

    def _take(self, key: Hashable) -> _RemoteSession | None:
        """The session known by this key, taken out of the table."""
        found = self._sessions.get(key)
        if not found:
            return None
        session = found.pop()
        if not found:
            del self._sessions[key]
        return session

    def _put(self, key: Hashable, session: _RemoteSession, row: EngineRow) -> None:
        session.length, session.last_step = row.length, self._step
        self._sessions.setdefault(key, []).append(session)

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
                if session.name not in causes:
                    continue
                num_steps = 1 if session.has_drafted else RETRY_STEPS
                session.retry_at = self._step + num_steps
                if num_steps > 1:
                    logger.warning("a sequence has no draft for %d steps: %s", num_steps, causes[session.name])


def _key(token_ids: Tokens) -> tuple[int, bytes]:
    return len(token_ids), token_ids[-TAIL:].tobytes()

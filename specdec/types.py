"""Sessions as plain data: what gateway, draft and target send to each other.

:mod:`specdec.codec` converts these classes to messages and back; :mod:`specdec.backends` has the interfaces that use
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from specdec import trees
from specdec.logprobs import PositionLogprobs
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE, DraftSampling, Rule, SparseRow
from specdec.state_dtypes import ELEMENT_BYTES, SCALE_BYTES
from specdec.tracing.headers import TraceHeaders


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens that continue the first ``base_len`` committed tokens."""

    epoch: int
    base_len: int
    token_ids: tuple[int, ...]
    #: Index of each token's parent, -1 for the prefix; empty means a chain.
    parents: tuple[int, ...] = ()
    #: Where a ratio rule needs q: one per group of siblings, in the order of their first tokens (in a chain one per
    #: token). Empty for deterministic and coupled drafts.
    q_rows: tuple[SparseRow, ...] = ()
    draft_ns: int = 0
    queue_ns: int = 0
    #: Of a stream: the number of the chain that it continues.
    chain: int = 0

    @property
    def depth(self) -> int:
        """Number of tokens of the longest path."""
        return max(trees.depths(self.parents)) + 1 if self.parents else len(self.token_ids)

    def cut(self, num_tokens: int, max_depth: int | None = None) -> Proposal:
        """The first ``num_tokens`` tokens whose depth in the tree is below ``max_depth``."""
        count = len(self.token_ids)
        if num_tokens >= count and (max_depth is None or max_depth >= self.depth):
            return self
        if not self.parents:
            num_tokens = num_tokens if max_depth is None else min(num_tokens, max_depth)
            return replace(self, token_ids=self.token_ids[:num_tokens], q_rows=self.q_rows[:num_tokens])
        kept = (range(count) if max_depth is None else trees.below(self.parents, max_depth))[:num_tokens]
        index = {old: new for new, old in enumerate(kept)} | {-1: -1}
        numbers = trees.groups(self.parents)
        groups = dict.fromkeys(numbers[old] for old in kept)
        return replace(
            self,
            token_ids=tuple(self.token_ids[old] for old in kept),
            parents=tuple(index[self.parents[old]] for old in kept),
            q_rows=tuple(self.q_rows[group] for group in groups) if self.q_rows else (),
        )

    def after(self, token_ids: tuple[int, ...]) -> Proposal | None:
        """What is left of a chain once ``token_ids`` are committed after its base; None: nothing, or they differ.

        It stays a draw from the same q: given the tokens that were committed, those after them are as they were drawn.
        """
        count = len(token_ids)
        if not count:
            return self
        if self.parents or self.token_ids[:count] != token_ids or len(self.token_ids) == count:
            return None
        rest = replace(self, base_len=self.base_len + count, token_ids=self.token_ids[count:])
        return replace(rest, q_rows=self.q_rows[count:]) if self.q_rows else rest


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of the target at successive positions: row i belongs to position ``start + i``.

    The row was computed by feeding the token at that position (0 is the first token of the prompt); the next token was
    predicted from it. Layers have the numbers of ``hidden_states`` in transformers: 0 is the output of the embedding, i
    the output of layer i, all before the final norm. -1 is the last layer's output after the final norm, which the
    output layer reads.
    """

    start: int
    #: Numbers per position: the states of the layers asked for, one after another, in the order asked for.
    num_features: int
    #: "bfloat16", "float16", "float32" or "int8".
    dtype: str
    #: Elements, little-endian, row by row: [num_positions, num_features]. Of int8 each ``group_size`` of them are
    #: followed by their scale, a float32.
    data: bytes = field(repr=False)
    #: Of int8: elements that share a scale.
    group_size: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        num_scales = self.num_features // self.group_size if self.group_size else 0
        return self.num_features * ELEMENT_BYTES[self.dtype] + num_scales * SCALE_BYTES

    @property
    def num_positions(self) -> int:
        """Number of rows."""
        return len(self.data) // self.row_bytes

    @property
    def end(self) -> int:
        """The position after that of the last row."""
        return self.start + self.num_positions

    def rows(self, start: int, end: int) -> HiddenStates:
        """The rows of positions ``start`` to ``end`` (exclusive) that are present; there may be none."""
        start, end = max(start, self.start), min(end, self.end)
        if (start, end) == (self.start, self.end):
            return self
        size = self.row_bytes
        data = self.data[(start - self.start) * size : max(0, end - self.start) * size]
        return HiddenStates(start, self.num_features, self.dtype, data, self.group_size)


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Where a round's time went, on the target, in nanoseconds, and how large its batch was."""

    queue_ns: int = 0
    forward_ns: int = 0
    verify_ns: int = 0
    batch_sessions: int = 0
    batch_rows: int = 0
    #: Entries of the KV cache that the sessions of the step hold together.
    batch_context: int = 0
    #: Filling the masks of structured outputs beside the forward pass; waiting for them after it (in ``verify_ns``).
    mask_fill_ns: int = 0
    mask_wait_ns: int = 0
    #: Since the session was opened: tokens that the sessions of other pacing groups got, and the time that they took,
    #: summed over them.
    others_tokens: int = 0
    others_ns: int = 0


@dataclass(frozen=True, slots=True)
class DraftedRound:
    """The proposal of a round that the target asked a draft for."""

    #: Its tokens, and those that were asked for.
    num_tokens: int
    num_asked: int
    #: How long the draft computed, and how long the target waited for it.
    draft_ns: int = 0
    wait_ns: int = 0
    #: Levels of the tree; 0: it was a chain.
    depth: int = 0
    #: Whether the draft streams, and the step verified what was there of ``num_asked`` tokens.
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a round: the accepted drafted tokens, then the target's own token."""

    epoch: int
    base_len: int
    token_ids: tuple[int, ...]
    num_accepted: int = 0
    num_draft_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    timings: RoundTimings = field(default_factory=RoundTimings)
    #: If the session asked for them: the states from which each of ``token_ids`` was predicted, in ascending order of
    #: position, so from position ``base_len - 1`` on. Those of the first verdict start at the first position computed.
    #: Those of tokens after which the target decodes on may come with a later verdict, at the latest with the one after
    #: which it waits for a request. The last verdict of a sequence may have none.
    hidden_states: tuple[HiddenStates, ...] = ()
    #: Tokens that the target still decodes in multi-step; 0: it waits for a request.
    num_multi_step_left: int = 0
    #: Set for a round whose proposal the target asked a draft for.
    drafted: DraftedRound | None = None
    #: Another verdict follows at once: what is made of both may wait for it.
    is_followed: bool = False
    #: When it was committed, by a steady clock of the target; 0: not told.
    committed_ns: int = 0

    @property
    def committed_len(self) -> int:
        """Committed length after the round."""
        return self.base_len + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The request to open a session, on a target or on a draft."""

    session_id: str
    epoch: int = 1
    #: The prompt, then the tokens already generated (after a move from another replica).
    token_ids: tuple[int, ...]
    prompt_len: int
    #: ``seed`` and ``max_tokens`` are always set; ``stop_token_ids`` already holds the end-of-sequence tokens.
    params: SamplingParams
    #: None means the target's default.
    rule: Rule | None = None
    #: The most drafted tokens of a round (k).
    num_speculative_tokens: int = 0
    #: The client named the session: what it continues was with the same target and draft.
    is_named: bool = False
    #: Name of the API key that the session belongs to; empty where no keys are asked for. Owners share nothing.
    owner: str = ""
    #: Separates an owner's sessions further: those of other salts share nothing with it.
    cache_salt: str = ""
    #: Whose slots and memory are counted: the key, or an address.
    client: str = ""
    #: The trace that the session belongs to; not part of the message, but sent beside it.
    trace_headers: TraceHeaders = ()
    #: Target only: share of the KV cache that the client's open sessions may hold; None: all of it.
    max_kv_share: float | None = None
    #: Target only: tokens to decode in multi-step right after the first one.
    multi_step_tokens: int = 0
    #: Target only: the hidden states each verdict carries, by their numbers (see :class:`HiddenStates`); empty: none.
    hidden_state_layers: tuple[int, ...] = ()
    #: Target only: send the states of one position per verdict, from which its last token was predicted.
    last_hidden_state_only: bool = False
    #: Target only: one of :data:`~specdec.state_dtypes.STATE_DTYPES`; empty: bfloat16.
    hidden_state_dtype: str = ""
    #: Target only: fingerprint of what makes features of the hidden states, if the target has it; empty: nothing.
    hidden_state_map: str = ""
    #: Target only: name of the sessions that are paced together (:attr:`RoundTimings.others_ns`); empty: it is not.
    pacing_group: str = ""
    #: Target only, on the way there: a draft to open meanwhile.
    draft: DraftOpening | None = None

    @property
    def draft_sampling(self) -> DraftSampling:
        """How a draft chooses the session's tokens."""
        return (self.rule or DEFAULT_RULE).sampling_at(self.params.temperature)

    @property
    def is_draft_invariant(self) -> bool:
        """Whether the text depends on the seed and the target alone, whatever was drafted."""
        return self.params.greedy or (self.rule or DEFAULT_RULE).is_draft_invariant

    @property
    def num_output_tokens(self) -> int:
        """Tokens of ``token_ids`` that count as output."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class DraftOpening:
    """The request to open a session on a draft that a target asks itself."""

    #: Where the draft listens; empty: behind the gateway, see :class:`specdec.backends.DraftRelay`.
    address: str
    #: Of the draft's session. The target puts in the tokens.
    spec: SessionSpec
    #: Seconds that a proposal may take.
    timeout_s: float
    #: Drafted tokens to ask for in each round as soon as it is open; 0: none.
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TargetOpened:
    """A target admitted the session and prefilled its tokens."""

    epoch: int
    rule: Rule
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    queue_ns: int = 0
    prefill_ns: int = 0
    #: Whether the session implements :class:`specdec.backends.DraftOpener`.
    asks_drafts: bool = False
    #: Of other machines, too, over TCP without certificates.
    asks_remote_drafts: bool = False
    #: Through the gateway, see :class:`specdec.backends.DraftRelay`.
    asks_relayed_drafts: bool = False
    #: The target has no map of the session's fingerprint, and would take it (:class:`specdec.backends.StateMapTaker`).
    wants_state_map: bool = False
    #: The target opens the draft of the session's spec.
    opens_draft: bool = False


@dataclass(frozen=True, slots=True)
class DraftOpened:
    """A draft admitted the session and prefilled its tokens."""

    epoch: int
    num_speculative_tokens: int
    num_cached_tokens: int = 0
    #: It can draft on while nobody answers.
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A description of a server's model; the fields are those of the message of the same name."""

    name: str
    architecture: str = ""
    vocab_size: int = 0
    tokenizer_size: int = 0
    tokenizer_fingerprint: str = ""
    max_model_len: int = 0
    dtype: str = ""
    device: str = ""
    num_parameters: int = 0
    eos_token_ids: tuple[int, ...] = ()
    kv_cache_tokens: int = 0
    method: str = ""
    num_speculative_tokens: int = 0
    verification: Rule | None = None
    version: str = ""
    #: Drafts: the numbers of the target's hidden states that the drafter reads (see :class:`HiddenStates`).
    hidden_state_layers: tuple[int, ...] = ()
    #: Drafts: the drafter reads the states of the newest committed position only.
    last_hidden_state_only: bool = False
    #: Drafts: the type in which they should come, one of :data:`~specdec.state_dtypes.STATE_DTYPES`; empty: bfloat16.
    hidden_state_dtype: str = ""
    #: Drafts: fingerprint of the head's first layer, which the target may evaluate; empty: it has none.
    hidden_state_map: str = ""
    #: How passes are executed, for people: the path and what was measured for its kernels.
    execution: str = ""
    #: Targets: bytes of the weights that each rank holds, and of the KV cache that each has.
    weight_bytes: tuple[int, ...] = ()
    kv_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's occupancy at one moment."""

    open_sessions: int = 0
    waiting_sessions: int = 0
    used_blocks: int = 0
    #: Of no session, but a later prompt may begin like them; given up when others need them.
    cached_blocks: int = 0
    total_blocks: int = 0
    stale_messages: int = 0
    #: Batches computed since the start, and the nanoseconds of their forward passes, sampling and verification.
    num_batches: int = 0
    busy_ns: int = 0
    #: Targets: times that a session lost its blocks to others, and was fed again later.
    preemptions: int = 0
    #: Targets: proposals that were dropped because multi-step decode had gone on.
    superseded_proposals: int = 0

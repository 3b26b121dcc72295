"""Conversion of sessions to messages and back: each dataclass of :mod:`specdec.types` has ``encode_`` and ``decode_``.

Decoding a message that contradicts itself raises :class:`InvalidRequest` naming the field. The receiving core checks
what depends on the model (token ids outside the vocabulary, prompts longer than the context).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

from google.protobuf.message import Message

from specdec.errors import InvalidRequest, Unavailable
from specdec.logprobs import ENTRY_BYTES, PositionLogprobs, pack_top
from specdec.params import SamplingParams
from specdec.params_codec import encode_sampling, read_parameters, write_parameters
from specdec.rules import Rule, SparseRow
from specdec.state_dtypes import ELEMENT_BYTES
from specdec.types import (
    DraftedRound,
    DraftOpened,
    DraftOpening,
    FinishReason,
    HiddenStates,
    ModelInfo,
    Proposal,
    RoundTimings,
    ServerLoad,
    SessionSpec,
    TargetOpened,
    Verdict,
)
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as pb

#: Rules and finish reasons have the names of their enums' values, after a prefix.
_RULE_VALUES: Final[dict[Rule | None, pb.VerificationRule.ValueType]] = {
    None: pb.VERIFICATION_RULE_UNSPECIFIED,
    **{rule: pb.VerificationRule.Value(f"VERIFICATION_RULE_{rule.name}") for rule in Rule},
}
_RULES: Final[dict[int, Rule | None]] = {value: rule for rule, value in _RULE_VALUES.items()}

_FINISH_VALUES: Final[dict[FinishReason | None, pb.FinishReason.ValueType]] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    **{reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason},
}
_FINISH_REASONS: Final[dict[int, FinishReason | None]] = {value: reason for reason, value in _FINISH_VALUES.items()}


def encode_rule(rule: Rule | None) -> pb.VerificationRule.ValueType:
    """The wire value of a rule; None is UNSPECIFIED."""
    return _RULE_VALUES[rule]


def decode_rule(value: int) -> Rule | None:
    """The rule of a wire value; UNSPECIFIED is None."""
    if value not in _RULES:
        raise InvalidRequest(f"verification is {value}, which this version does not know", param="verification")
    return _RULES[value]


def _read_finish_reason(value: int) -> FinishReason | None:
    """The finish reason of a wire value. An unknown one comes from a newer server: :class:`Unavailable`."""
    if value not in _FINISH_REASONS:
        raise Unavailable(f"the server sent finish reason {value}, which this version does not know")
    return _FINISH_REASONS[value]


class SharedTokenIds(tuple[int, ...]):
    """Token ids that several sessions open with. They are converted once: 131,072 take milliseconds."""

    @cached_property
    def message(self) -> pb.TokenIds:
        """The ids as a message."""
        return pb.TokenIds(ids=self)


def encode_open_target(spec: SessionSpec) -> target_pb.VerifyRequest:
    """A spec as the first message of a target stream."""
    request = target_pb.VerifyRequest(
        open=target_pb.OpenTargetSession(
            **_opening(target_pb.OpenTargetSession, spec),
            multi_step_tokens=spec.multi_step_tokens,
            hidden_state_layers=spec.hidden_state_layers,
            last_hidden_state_only=spec.last_hidden_state_only,
            hidden_state_dtype=spec.hidden_state_dtype,
            hidden_state_map=spec.hidden_state_map,
            max_kv_share=spec.max_kv_share,
            pacing_group=spec.pacing_group,
            packs_logprobs=True,
        )
    )
    if spec.draft is not None:
        request.open.draft.CopyFrom(encode_draft_opening(spec.epoch, spec.draft))
    _add_token_ids(request.open, spec.token_ids)
    return request


def encode_draft_opening(epoch: int, opening: DraftOpening) -> target_pb.OpenDraft:
    """A draft to open for the target's session of ``epoch``."""
    return target_pb.OpenDraft(
        epoch=epoch,
        address=opening.address,
        session=encode_open_draft(replace(opening.spec, token_ids=())).open,
        timeout_ms=round(1e3 * opening.timeout_s),
        trace_headers=dict(opening.spec.trace_headers),
        num_draft_tokens=opening.num_draft_tokens,
    )


def decode_open_target(message: target_pb.OpenTargetSession) -> SessionSpec:
    """The spec of a target session, without its draft."""
    share = message.max_kv_share if message.HasField("max_kv_share") else None
    if share is not None and not 0.0 <= share <= 1.0:  # NaN included
        raise InvalidRequest(f"max_kv_share is {share}; give a number from 0 to 1", param="max_kv_share")
    return replace(
        decode_open_draft(message),
        multi_step_tokens=message.multi_step_tokens,
        hidden_state_layers=tuple(message.hidden_state_layers),
        last_hidden_state_only=message.last_hidden_state_only,
        hidden_state_dtype=message.hidden_state_dtype,
        hidden_state_map=message.hidden_state_map,
        max_kv_share=share,
        pacing_group=message.pacing_group,
    )


def encode_open_draft(spec: SessionSpec) -> draft_pb.DraftRequest:
    """A spec as the first message of a draft stream."""
    request = draft_pb.DraftRequest(open=draft_pb.OpenDraftSession(**_opening(draft_pb.OpenDraftSession, spec)))
    _add_token_ids(request.open, spec.token_ids)
    return request


def _add_token_ids(
    message: target_pb.OpenTargetSession | draft_pb.OpenDraftSession, token_ids: tuple[int, ...]
) -> None:
    """Added to the finished request: a message that becomes part of another one is copied."""
    if isinstance(token_ids, SharedTokenIds):
        message.token_ids.MergeFrom(token_ids.message.ids)
    else:
        message.token_ids.extend(token_ids)


def _opening(message: type[Message], spec: SessionSpec) -> dict[str, Any]:
    """The fields that both messages have, without the token ids."""
    return {
        "session_id": spec.session_id,
        "epoch": spec.epoch,
        "prompt_len": spec.prompt_len,
        "sampling": encode_sampling(spec.params),
        "verification": encode_rule(spec.rule),
        "num_speculative_tokens": spec.num_speculative_tokens,
        "park": spec.is_named,
        "owner": spec.owner,
        "cache_salt": spec.cache_salt,
        "client": spec.client,
        **write_parameters(message, spec.params),
    }


def _decode_params(message: target_pb.OpenTargetSession | draft_pb.OpenDraftSession) -> SamplingParams:
    """The parameters of a session. ``ignore_eos`` is set: end-of-sequence tokens are among the stop tokens."""
    return SamplingParams(**read_parameters(message.sampling) | read_parameters(message), ignore_eos=True)


def decode_open_draft(message: target_pb.OpenTargetSession | draft_pb.OpenDraftSession) -> SessionSpec:
    """The spec of a draft session, or the same part of a target session's."""
    if not 0 < message.prompt_len <= len(message.token_ids):
        raise InvalidRequest(
            f"prompt_len is {message.prompt_len}, but it must be at least 1 and at most the number of token_ids"
            f" ({len(message.token_ids)})",
            param="prompt_len",
        )
    return SessionSpec(
        session_id=message.session_id,
        epoch=message.epoch,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        params=_decode_params(message),
        rule=decode_rule(message.verification),
        num_speculative_tokens=message.num_speculative_tokens,
        is_named=message.park,
        owner=message.owner,
        cache_salt=message.cache_salt,
        client=message.client,
    )


def encode_proposal(proposal: Proposal) -> pb.Proposal:
    """A proposal, with q rows where it has them."""
    return pb.Proposal(
        epoch=proposal.epoch,
        base_len=proposal.base_len,
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        q_rows=[pb.SparseRow(packed=row.packed) for row in proposal.q_rows],
        draft_ns=proposal.draft_ns,
        queue_ns=proposal.queue_ns,
        chain=proposal.chain,
    )


def decode_proposal(message: pb.Proposal) -> Proposal:
    """A proposal, whose parts may not fit each other. The q rows stay packed: only a target reads them.

    Raises:
        InvalidRequest: it was drafted ahead of a verdict; an older gateway continues without drafts then.
    """
    if message.assumed_token_ids:
        raise InvalidRequest(
            f"the proposal assumes {len(message.assumed_token_ids)} tokens that are not committed; proposals drafted"
            " ahead of verdicts are not taken any more: set num_ahead_proposals to 0, or update the gateway",
            param="assumed_token_ids",
        )
    return Proposal(
        epoch=message.epoch,
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        parents=tuple(message.parents),
        q_rows=tuple([SparseRow(row.packed) for row in message.q_rows]),
        draft_ns=message.draft_ns,
        queue_ns=message.queue_ns,
        chain=message.chain,
    )


def encode_logprobs(entries: Iterable[PositionLogprobs], *, packs: bool = False) -> list[pb.PositionLogprobs]:
    """The log-probabilities of several positions. ``packs``: the reader takes ``packed_top``."""
    messages = []
    for entry in entries:
        token = pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)
        if packs:
            messages.append(pb.PositionLogprobs(token=token, packed_top=entry.packed_top))
            continue
        top = [
            pb.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank)
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        ]
        messages.append(pb.PositionLogprobs(token=token, top=top))
    return messages


def decode_logprobs(messages: Iterable[pb.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    """The log-probabilities of several positions. Raises :class:`Unavailable` for packed ones that cannot be read."""
    entries = []
    for message in messages:
        token, packed = message.token, message.packed_top
        if len(packed) % ENTRY_BYTES:
            raise Unavailable(
                f"the server sent packed_top of {len(packed)} bytes, which is no multiple of {ENTRY_BYTES}"
            )
        if message.top:
            packed = pack_top((each.token_id, each.logprob) for each in message.top)
        entries.append(PositionLogprobs(token.token_id, token.logprob, token.rank, packed))
    return tuple(entries)


def encode_hidden_states(states: HiddenStates) -> pb.HiddenStates:
    """Hidden states at successive positions; the fields have equal names on both sides."""
    return pb.HiddenStates(**_values(states, HiddenStates))


def decode_hidden_states(message: pb.HiddenStates) -> HiddenStates:
    """Hidden states whose bytes are whole rows, at least one."""
    if message.dtype not in ELEMENT_BYTES:
        raise InvalidRequest(
            f"hidden_states have dtype {message.dtype!r}; known are {', '.join(ELEMENT_BYTES)}", param="hidden_states"
        )
    if not message.num_features:
        raise InvalidRequest("hidden_states have num_features 0; it must be at least 1", param="hidden_states")
    group_size = message.group_size
    if (message.dtype == "int8") != bool(group_size) or (group_size and message.num_features % group_size):
        raise InvalidRequest(
            f"hidden_states of {message.num_features} {message.dtype} have group_size {group_size}; it must divide"
            " num_features where they are int8, and be 0 where not",
            param="hidden_states",
        )
    states = HiddenStates(**_values(message, HiddenStates))
    num_bytes, row_bytes = len(message.data), states.row_bytes
    if not num_bytes or num_bytes % row_bytes:
        raise InvalidRequest(
            f"hidden_states have {num_bytes} bytes of data, which is no whole number of rows of {message.num_features}"
            f" {message.dtype} ({row_bytes} bytes), at least one",
            param="hidden_states",
        )
    return states


def decode_verdict_states(message: pb.HiddenStates) -> HiddenStates:
    """:func:`decode_hidden_states` for states sent by a server: an error in them is the server's, not the user's."""
    try:
        return decode_hidden_states(message)
    except InvalidRequest as error:
        raise Unavailable(f"the server sent hidden states that cannot be read: {error}") from error


def encode_verdict(verdict: Verdict, *, packs_logprobs: bool = False) -> target_pb.Verdict:
    """What a round committed. ``packs_logprobs``: as the session asked."""
    drafted = verdict.drafted
    return target_pb.Verdict(
        epoch=verdict.epoch,
        base_len=verdict.base_len,
        token_ids=verdict.token_ids,
        num_accepted=verdict.num_accepted,
        num_draft_tokens=verdict.num_draft_tokens,
        finish_reason=_FINISH_VALUES[verdict.finish_reason],
        stop_token_id=verdict.stop_token_id,
        logprobs=encode_logprobs(verdict.logprobs, packs=packs_logprobs),
        timings=target_pb.RoundTimings(**_values(verdict.timings, RoundTimings)),
        hidden_states=map(encode_hidden_states, verdict.hidden_states),
        num_multi_step_left=verdict.num_multi_step_left,
        drafted=None if drafted is None else target_pb.DraftedRound(**_values(drafted, DraftedRound)),
        is_followed=verdict.is_followed,
        committed_ns=verdict.committed_ns,
    )


#: In half the time of a dictionary: there is one of each in every verdict.
_TIMINGS = attrgetter(*RoundTimings.__dataclass_fields__)
_DRAFTED = attrgetter(*DraftedRound.__dataclass_fields__)


def decode_verdict(message: target_pb.Verdict) -> Verdict:
    """What a round committed."""
    return Verdict(
        epoch=message.epoch,
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        num_accepted=message.num_accepted,
        num_draft_tokens=message.num_draft_tokens,
        finish_reason=_read_finish_reason(message.finish_reason),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        logprobs=decode_logprobs(message.logprobs),
        timings=RoundTimings(*_TIMINGS(message.timings)),
        hidden_states=tuple(map(decode_verdict_states, message.hidden_states)),
        num_multi_step_left=message.num_multi_step_left,
        drafted=DraftedRound(*_DRAFTED(message.drafted)) if message.HasField("drafted") else None,
        is_followed=message.is_followed,
        committed_ns=message.committed_ns,
    )


def encode_target_opened(opened: TargetOpened, *, packs_logprobs: bool = False) -> target_pb.TargetSessionOpened:
    """What a target found on opening a session. ``packs_logprobs``: as the session asked."""
    return target_pb.TargetSessionOpened(
        epoch=opened.epoch,
        num_cached_tokens=opened.num_cached_tokens,
        prompt_logprobs=encode_logprobs(opened.prompt_logprobs, packs=packs_logprobs),
        queue_ns=opened.queue_ns,
        prefill_ns=opened.prefill_ns,
        verification=encode_rule(opened.rule),
        asks_drafts=opened.asks_drafts,
        asks_remote_drafts=opened.asks_remote_drafts,
        asks_relayed_drafts=opened.asks_relayed_drafts,
        wants_state_map=opened.wants_state_map,
        opens_draft=opened.opens_draft,
    )


def decode_target_opened(message: target_pb.TargetSessionOpened) -> TargetOpened:
    """What a target found on opening a session. Raises :class:`Unavailable` if the target names no known rule."""
    if (rule := _RULES.get(message.verification)) is None:
        raise Unavailable(f"the target opened a session with verification {message.verification}, which is no rule")
    return TargetOpened(
        epoch=message.epoch,
        rule=rule,
        num_cached_tokens=message.num_cached_tokens,
        prompt_logprobs=decode_logprobs(message.prompt_logprobs),
        queue_ns=message.queue_ns,
        prefill_ns=message.prefill_ns,
        asks_drafts=message.asks_drafts,
        asks_remote_drafts=message.asks_remote_drafts,
        asks_relayed_drafts=message.asks_relayed_drafts,
        wants_state_map=message.wants_state_map,
        opens_draft=message.opens_draft,
    )


def encode_draft_opened(opened: DraftOpened) -> draft_pb.DraftSessionOpened:
    """What a draft found on opening a session."""
    return draft_pb.DraftSessionOpened(**_values(opened, DraftOpened))


def decode_draft_opened(message: draft_pb.DraftSessionOpened) -> DraftOpened:
    """What a draft found on opening a session."""
    return DraftOpened(**_values(message, DraftOpened))


def encode_model_info(info: ModelInfo) -> pb.ModelInfo:
    """What a server says about its model."""
    return pb.ModelInfo(**_values(info, ModelInfo) | {"verification": encode_rule(info.verification)})


def decode_model_info(message: pb.ModelInfo) -> ModelInfo:
    """What a server says about its model."""
    own = {
        "eos_token_ids": tuple(message.eos_token_ids),
        "hidden_state_layers": tuple(message.hidden_state_layers),
        "weight_bytes": tuple(message.weight_bytes),
        "verification": decode_rule(message.verification),
    }
    return ModelInfo(**_values(message, ModelInfo) | own)


def encode_load(load: ServerLoad) -> pb.ServerLoad:
    """A server's occupancy."""
    return pb.ServerLoad(**_values(load, ServerLoad))


def decode_load(message: pb.ServerLoad) -> ServerLoad:
    """A server's occupancy."""
    return ServerLoad(**_values(message, ServerLoad))


def _values(source: object, dataclass: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass, from one or from the message whose fields have the same names."""
    return {name: getattr(source, name) for name in dataclass.__dataclass_fields__}

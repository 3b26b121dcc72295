"""Every dataclass of sessions survives the wire; messages that contradict themselves do not."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import codec
from specdec.errors import InvalidRequest, Unavailable
from specdec.logprobs import PositionLogprobs, pack_top
from specdec.params import MAX_LOGPROBS, SamplingParams
from specdec.rules import Rule, SparseRow
from specdec.state_dtypes import ELEMENT_BYTES
from specdec.types import (
    DraftedRound,
    DraftOpened,
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

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
ids = st.lists(uint32, max_size=6).map(tuple)
text = st.text(max_size=8)
rules = st.sampled_from(list(Rule))
some_rules = st.none() | rules
finite = st.floats(allow_nan=False, allow_infinity=False)

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(100, 2**32 - 1),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 5),
    logit_bias=st.dictionaries(uint32, st.floats(-100, 100), max_size=3),
    allowed_token_ids=ids,
    bad_token_ids=st.lists(st.lists(uint32, min_size=1, max_size=3), max_size=3),
    stop_token_ids=ids,
    ignore_eos=st.just(True),  # the stop tokens hold the end-of-sequence tokens
    seed=uint64,
)
layers = st.lists(st.integers(-1, 200), max_size=3).map(tuple)
some_logprobs = st.none() | st.integers(0, MAX_LOGPROBS)


@st.composite
def specs(draw, *, target: bool) -> SessionSpec:
    token_ids = draw(st.lists(uint32, min_size=1, max_size=10).map(tuple))
    given_params = draw(params)
    if target:
        given_params = dataclasses.replace(
            given_params, logprobs=draw(some_logprobs), prompt_logprobs=draw(some_logprobs)
        )
    return SessionSpec(
        session_id=draw(text),
        epoch=draw(uint32),
        token_ids=token_ids,
        prompt_len=draw(st.integers(1, len(token_ids))),
        params=given_params,
        rule=draw(some_rules),
        num_speculative_tokens=draw(uint32),
        is_named=draw(st.booleans()),
        cache_salt=draw(st.text(max_size=3)),
        owner=draw(text),
        client=draw(text),
        max_kv_share=draw(st.none() | st.floats(0, 1)) if target else None,
        multi_step_tokens=draw(uint32) if target else 0,
        hidden_state_layers=draw(layers) if target else (),
        last_hidden_state_only=draw(st.booleans()) if target else False,
        hidden_state_dtype=draw(text) if target else "",
        pacing_group=draw(text) if target else "",
    )


@st.composite
def proposals(draw) -> Proposal:
    token_ids = draw(ids)
    with_rows, tree = draw(st.booleans()), draw(st.booleans())
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(len(token_ids))) if tree else ()
    num_rows = len(set(parents)) if parents else len(token_ids)
    return Proposal(
        epoch=draw(uint32),
        base_len=draw(uint32),
        token_ids=token_ids,
        parents=parents,
        q_rows=tuple(SparseRow(draw(st.binary(max_size=8))) for _ in range(num_rows)) if with_rows else (),
        draft_ns=draw(uint64),
        queue_ns=draw(uint64),
    )


float32 = st.floats(-1e3, 0, width=32)
tops = st.lists(st.tuples(uint32, float32), max_size=3).map(pack_top)
logprobs = st.lists(st.builds(PositionLogprobs, uint32, float32, uint32, tops), max_size=3).map(tuple)


@st.composite
def hidden_states(draw) -> HiddenStates:
    dtype, num_features = draw(st.sampled_from(list(ELEMENT_BYTES))), draw(st.integers(1, 5))
    group_size = draw(st.sampled_from([1, num_features])) if dtype == "int8" else 0
    one = HiddenStates(draw(uint32), num_features, dtype, b"", group_size)
    num_bytes = draw(st.integers(1, 4)) * one.row_bytes
    return replace(one, data=draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


timings = st.builds(RoundTimings, *(uint64,) * 3, *(uint32,) * 2, *(uint64,) * 5)
verdicts = st.builds(
    Verdict,
    epoch=uint32,
    base_len=uint32,
    token_ids=ids,
    num_accepted=uint32,
    num_draft_tokens=uint32,
    finish_reason=st.none() | st.sampled_from(list(FinishReason)),
    stop_token_id=st.none() | uint32,
    logprobs=logprobs,
    timings=timings,
    hidden_states=st.lists(hidden_states(), max_size=2).map(tuple),
    drafted=st.none() | st.builds(DraftedRound, uint32, uint32, uint64, uint64, uint32),
    is_followed=st.booleans(),
    committed_ns=uint64,
)
target_openeds = st.builds(TargetOpened, uint32, rules, uint32, logprobs, uint64, uint64, st.booleans())
draft_openeds = st.builds(DraftOpened, uint32, uint32, uint32)
model_infos = st.builds(
    ModelInfo,
    name=text,
    architecture=text,
    vocab_size=uint32,
    tokenizer_size=uint32,
    tokenizer_fingerprint=text,
    max_model_len=uint32,
    dtype=text,
    device=text,
    num_parameters=uint64,
    eos_token_ids=ids,
    kv_cache_tokens=uint64,
    method=text,
    num_speculative_tokens=uint32,
    verification=some_rules,
    version=text,
    hidden_state_layers=layers,
    last_hidden_state_only=st.booleans(),
    hidden_state_dtype=text,
    weight_bytes=st.lists(uint64, max_size=4).map(tuple),
    kv_cache_bytes=uint64,
)
loads = st.builds(ServerLoad, uint32, uint32, uint32, uint64, uint64, uint64, uint64, uint64)

CASES = {
    "open_target": specs(target=True),
    "open_draft": specs(target=False),
    "proposal": proposals(),
    "logprobs": logprobs,
    "verdict": verdicts,
    "hidden_states": hidden_states(),
    "target_opened": target_openeds,
    "draft_opened": draft_openeds,
    "model_info": model_infos,
    "load": loads,
    "rule": some_rules,
}


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name):
    encode, decode = getattr(codec, f"encode_{name}"), getattr(codec, f"decode_{name}")

    @settings(max_examples=60)
    @given(CASES[name])
    def check(value):
        message = encode(value)
        if name.startswith("open_"):
            message = message.open
        if hasattr(message, "SerializeToString"):
            message = type(message).FromString(message.SerializeToString())
        assert decode(message) == value

    check()


@given(logprobs)
def test_packed_logprobs_are_the_same(value):
    """What a gateway of now gets of a target of now; it asks for them, and older targets do not know that."""
    spec = SessionSpec(session_id="s", token_ids=(1,), prompt_len=1, params=SamplingParams(seed=1))
    assert codec.encode_open_target(spec).open.packs_logprobs
    packed = codec.encode_verdict(Verdict(1, 1, (), logprobs=value), packs_logprobs=True)
    assert not any(position.top for position in packed.logprobs)
    opened = codec.encode_target_opened(TargetOpened(1, Rule.TOKEN, prompt_logprobs=value), packs_logprobs=True)
    for entries in (packed.logprobs, opened.prompt_logprobs):
        assert codec.decode_logprobs(entries) == value


def test_token_ids_that_sessions_share_are_converted_once():
    class Counted(codec.SharedTokenIds):
        num_reads = 0

        def __iter__(self):
            self.num_reads += 1
            return super().__iter__()

    shared = Counted(range(1000))
    spec = SessionSpec(session_id="s", epoch=1, token_ids=shared, prompt_len=1000, params=SamplingParams(seed=1))
    plain = dataclasses.replace(spec, token_ids=tuple(shared))
    shared.num_reads = 0
    for encode in (codec.encode_open_target, codec.encode_open_draft):
        for _ in range(3):
            assert encode(spec) == encode(plain)
    assert shared.num_reads == 1


def test_every_codec_function_is_covered():
    functions = {name.split("_", 1)[1] for name in dir(codec) if name.startswith(("encode_", "decode_"))}
    assert functions - {"sampling", "verdict_states", "draft_opening"} == set(CASES)


@pytest.mark.parametrize(
    ("decode", "message", "problem"),
    [
        (codec.decode_open_target, target_pb.OpenTargetSession(max_tokens=4), "prompt_len is 0"),
        (
            codec.decode_open_draft,
            draft_pb.OpenDraftSession(token_ids=[1], prompt_len=2, max_tokens=4),
            r"prompt_len is 2.*\(1\)",
        ),
        (
            codec.decode_open_target,
            target_pb.OpenTargetSession(token_ids=[1], prompt_len=1, max_tokens=4, sampling={"top_p": 3.0}),
            "top_p is 3.0",
        ),
        (
            codec.decode_open_target,
            target_pb.OpenTargetSession(token_ids=[1], prompt_len=1, max_tokens=4, verification=9),
            "verification is 9",
        ),
        (
            codec.decode_open_target,
            target_pb.OpenTargetSession(token_ids=[1], prompt_len=1, max_tokens=4, max_kv_share=float("inf")),
            "max_kv_share is inf; give a number from 0 to 1",
        ),
        (
            codec.decode_hidden_states,
            pb.HiddenStates(num_features=2, dtype="int4", data=b"1234"),
            "'int4'; known are bfloat16, float16, float32, int8",
        ),
        (codec.decode_hidden_states, pb.HiddenStates(num_features=2, dtype="int8", data=b"12"), "have group_size 0"),
        (
            codec.decode_hidden_states,
            pb.HiddenStates(num_features=3, dtype="int8", data=b"1234567", group_size=2),
            "3 int8 have group_size 2; it must divide",
        ),
        (
            codec.decode_hidden_states,
            pb.HiddenStates(num_features=2, dtype="bfloat16", data=b"1234", group_size=2),
            "be 0 where not",
        ),
        (codec.decode_hidden_states, pb.HiddenStates(dtype="bfloat16", data=b"1234"), "num_features 0"),
        (
            codec.decode_hidden_states,
            pb.HiddenStates(num_features=2, dtype="bfloat16"),
            "0 bytes of data.* at least one",
        ),
        (
            codec.decode_hidden_states,
            pb.HiddenStates(num_features=3, dtype="bfloat16", data=b"12345678"),
            r"8 bytes of data, .* rows of 3 bfloat16 \(6 bytes\)",
        ),
    ],
)
def test_messages_that_contradict_themselves(decode, message, problem):
    with pytest.raises(InvalidRequest, match=problem):
        decode(message)


def test_what_a_newer_server_says_is_not_the_users_fault():
    with pytest.raises(Unavailable, match="finish reason 9"):
        codec.decode_verdict(target_pb.Verdict(finish_reason=9))
    with pytest.raises(Unavailable, match="cannot be read: hidden_states have dtype 'int4'"):
        codec.decode_verdict(
            target_pb.Verdict(hidden_states=[pb.HiddenStates(num_features=2, dtype="int4", data=b"12")])
        )
    with pytest.raises(Unavailable, match="packed_top of 12 bytes, which is no multiple of 8"):
        codec.decode_verdict(target_pb.Verdict(logprobs=[pb.PositionLogprobs(packed_top=b"1" * 12)]))
    with pytest.raises(Unavailable, match="verification 0, which is no rule"):
        codec.decode_target_opened(target_pb.TargetSessionOpened())
    with pytest.raises(Unavailable, match="verification 77, which is no rule"):
        codec.decode_target_opened(target_pb.TargetSessionOpened(verification=77))

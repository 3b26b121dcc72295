"""The table of sampling parameters: its limits, and that everything which must follow it does."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from specdec.errors import InvalidRequest
from specdec.params import MAX_SEED, Parameter, SamplingParams, Stage, parameter, parameters
from specdec.v1 import generation_service_pb2, target_service_pb2, types_pb2

ROWS = {row.name: row for row in parameters()}
NUMBERS = [row for row in parameters() if row.type in (int, float, int | None)]


def refusal(**values: object) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    return str(caught.value), caught.value.param


def limits(row: Parameter) -> str:
    return f"{'(' if row.is_low_open else '['}{row.low}, {row.high}]"


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_a_number_out_of_range_is_refused_by_name_value_and_limits(row: Parameter) -> None:
    outside = [] if math.isinf(row.high) else [row.high + 1]
    outside += [row.low] if row.is_low_open else [row.low - 1] if row.name != "top_k" else [-2]
    for value in outside:
        assert refusal(**{row.name: value}) == (f"{row.name} is {value}, outside {limits(row)}", row.name)


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
@pytest.mark.parametrize("value", [True, "1", math.nan, math.inf])
def test_what_is_no_number_is_refused(row: Parameter, value: object) -> None:
    wanted = "a finite number" if row.type is float else "a whole number"
    assert refusal(**{row.name: value}) == (f"{row.name} must be {wanted}, not {value!r}", row.name)


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_limits_are_allowed(row: Parameter) -> None:
    for value in (row.high, row.low):
        if math.isfinite(value) and not (row.is_low_open and value == row.low):
            wanted = value & MAX_SEED if row.name == "seed" else value
            assert getattr(SamplingParams(**{row.name: value, "max_tokens": None}), row.name) == wanted or (
                row.name == "max_tokens"
            )


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_the_limits_of_a_whole_number_fit_its_field_of_a_message(row: Parameter) -> None:
    for owner in (
        generation_service_pb2.GenerateRequest,
        types_pb2.SamplingParams,
        target_service_pb2.OpenTargetSession,
    ):
        if row.number is int and row.name in owner.DESCRIPTOR.fields_by_name:
            for value in (row.low, row.high):
                owner(**{row.name: value & MAX_SEED if row.name == "seed" else value})


def test_numbers_of_any_length_are_refused_in_few_words() -> None:
    assert refusal(top_k=10**400) == (f"top_k is a number of about 10^400, outside {limits(ROWS['top_k'])}", "top_k")
    assert refusal(logit_bias={1: -(10**5000)})[0].startswith("logit_bias is a number of about -10^5000, outside")


def test_biases_are_checked_one_by_one() -> None:
    assert refusal(logit_bias={1: 3.0, 2: -101.0}) == (
        "logit_bias is -101.0, outside [-100.0, 100.0]",
        "logit_bias",
    )


def test_parameters_that_contradict_each_other() -> None:
    assert refusal(min_tokens=9, max_tokens=8) == ("min_tokens (9) is above max_tokens (8)", "min_tokens")
    assert refusal(stop=["a", ""]) == ("stop contains an empty string; leave it out", "stop")
    assert refusal(bad_token_ids=[[]]) == ("bad_token_ids contains an empty sequence; leave it out", "bad_token_ids")


def test_values_are_frozen() -> None:
    params = SamplingParams(stop="x", bad_token_ids=[[1, 2]], stop_token_ids=[3], logit_bias={4: 1}, top_k=-1)
    assert (params.stop, params.bad_token_ids, params.stop_token_ids) == (("x",), ((1, 2),), (3,))
    assert (params.logit_bias, params.top_k) == ({4: 1.0}, 0)


def test_what_is_in_use() -> None:
    assert [row.name for row in SamplingParams(max_tokens=None).in_use()] == []
    assert [row.name for row in SamplingParams(top_p=0.5, seed=0).in_use()] == ["max_tokens", "top_p", "seed"]


def test_a_field_without_a_row_counts_as_sampling() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class More(SamplingParams):
        forgotten: float = 0.0
        xtc_threshold: float = parameter(0.1, "share", Stage.TRUNCATION, low=0.0, high=0.5, neutral=0.0)

    assert {row.name for row in parameters(More)} == {entry.name for entry in fields(More)}
    in_use = {row.name: row.stage.is_sampling for row in More(forgotten=1.0).in_use()}
    assert in_use == {"max_tokens": False, "forgotten": True, "xtc_threshold": True}
    with pytest.raises(InvalidRequest, match=r"xtc_threshold is 0\.6, outside \[0\.0, 0\.5\]"):
        More(xtc_threshold=0.6)


# --- the wire ---

ON_THE_WIRE = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name


def test_draft_and_target_are_told_every_parameter_of_sampling() -> None:
    told = set(ON_THE_WIRE) | {"max_tokens"}
    assert told - set(ROWS) == set()
    assert {row.name for row in parameters() if row.stage.is_sampling} <= told
    sessions = target_service_pb2.OpenTargetSession.DESCRIPTOR.fields_by_name
    assert {row.name for row in parameters() if row.stage is Stage.SESSION} <= {*ON_THE_WIRE, *sessions}


def test_an_unset_field_means_the_default() -> None:
    """Presence is needed where the zero of the wire is another value than the default."""
    for row in parameters():
        entry = ON_THE_WIRE.get(row.name)
        if entry is not None and not entry.has_presence and row.name != "seed":
            assert not row.default


def test_the_gateways_message_has_every_parameter_but_these() -> None:
    request = generation_service_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    missing = set(ROWS) - set(ON_THE_WIRE) - set(request)
    assert missing == {"detokenize"}


def test_the_documentation_of_the_api_names_every_parameter() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert [row.name for row in parameters() if row.in_rest and f"`{row.name}`" not in page] == []

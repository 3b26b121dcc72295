"""Rules by their properties."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specdec
from specdec import codec
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE, SEEDED_RULE, DraftSampling, Rule, one_rule_per_sampling
from specdec.types import SessionSpec
from specdec.v1 import types_pb2 as pb

PACKAGES = ("specdec", "engine", "draft_service", "target_service", "gateway", "tandem")


def test_at_temperature_0_every_rule_drafts_the_argmax() -> None:
    assert {rule.sampling_at(0.0) for rule in Rule} == {DraftSampling.ARGMAX}


def test_above_temperature_0_each_rule_has_its_own_sampling() -> None:
    assert [rule.sampling_at(1e-6) for rule in (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)] == [
        DraftSampling.FROM_Q,
        DraftSampling.FROM_Q,
        DraftSampling.SHARED_NOISE,
    ]


def test_a_seed_alone_decides_the_text() -> None:
    assert SEEDED_RULE.is_draft_invariant
    assert not DEFAULT_RULE.is_draft_invariant


@pytest.mark.parametrize(
    ("rule", "temperature", "sampling", "is_draft_invariant"),
    [
        (Rule.COUPLED, 0.0, DraftSampling.ARGMAX, True),
        (Rule.BLOCK, 0.0, DraftSampling.ARGMAX, True),
        (Rule.COUPLED, 1.0, DraftSampling.SHARED_NOISE, True),
        (Rule.BLOCK, 1.0, DraftSampling.FROM_Q, False),
        (None, 1.0, DraftSampling.FROM_Q, False),
    ],
)
def test_a_session_samples_by_its_rule_and_temperature(
    rule: Rule | None, temperature: float, sampling: DraftSampling, is_draft_invariant: bool
) -> None:
    params = SamplingParams(temperature=temperature)
    spec = SessionSpec(session_id="s", token_ids=(1,), prompt_len=1, params=params, rule=rule)
    assert (spec.draft_sampling, spec.is_draft_invariant) == (sampling, is_draft_invariant)


def test_a_warm_up_meets_every_sampling_once() -> None:
    samplings = [rule.sampling for rule in one_rule_per_sampling()]
    assert sorted(samplings) == sorted({rule.sampling for rule in Rule})


def test_a_rule_is_its_name() -> None:
    assert [str(rule) for rule in Rule] == ["token", "block", "coupled"]
    assert [Rule(str(rule)) for rule in Rule] == list(Rule)


def test_only_registries_name_rules() -> None:
    """Code asks for properties; so a new rule touches these files, the proto, and a file of its own mathematics."""
    root = Path(specdec.__file__).parents[1]
    names = "|".join(rule.name for rule in Rule)
    named = re.compile(rf"\b(Rule\.|VERIFICATION_RULE_)({names})\b")
    files = [path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*.py")]
    assert {str(path) for path in files if "v1" not in path.parts and named.search((root / path).read_text())} == {
        "specdec/rules.py",  # the members
        "target_service/verification/rules/registry.py",  # how the target verifies
        "engine/native/sampling_verify.py",  # which of them the kernels know: may be left as it is
    }


def test_every_rule_has_a_wire_value_and_every_wire_value_a_rule() -> None:
    assert {codec.decode_rule(value) for value in pb.VerificationRule.values()} == {None, *Rule}
    assert [codec.decode_rule(codec.encode_rule(rule)) for rule in Rule] == list(Rule)

"""A target that pretends how much it accepts: how much that is, and that nothing but a measurement leads there."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import DraftSettings, GatewaySettings, TargetSettings
from specdec.settings.option import options_of
from specdec.v1 import generation_service_pb2, target_service_pb2
from target_service.core import TargetCore
from target_service.synthetic_target import SyntheticVerifier
from target_service.verification.rounds import Round
from target_service.verification.verifier import Verifier

pytestmark = pytest.mark.usefixtures("one_thread", "kernels")
V = 32


def a_round(start_row: int, draft: tuple[int, ...], parents: tuple[int, ...] = ()) -> Round:
    state = SamplingState(SamplingParams(temperature=0.0, seed=0), [1, 2], 2, V)
    return Round(state, Rule.BLOCK, start_row, draft, parents=parents)


@pytest.mark.parametrize("length", [1.0, 2.75, 5.0])
def test_as_much_is_accepted_as_was_asked_for(length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticVerifier, "length", length)
    verifier = SyntheticVerifier()
    logits = torch.randn(600 * 5 + 1, V)
    rounds = [a_round(5 * i, (3, 1, 4, 1)) for i in range(600)]
    *outcomes, plain = verifier.verify(logits, [*rounds, a_round(3000, ())])
    counts = Counter(outcome.num_accepted for outcome in outcomes)
    assert set(counts) <= {int(length) - 1, int(length)}, "the schedule of least variance"
    assert sum(len(outcome.token_ids) for outcome in outcomes) / 600 == pytest.approx(length, abs=0.06)
    for i, outcome in enumerate(outcomes):
        accepted = outcome.num_accepted
        assert outcome.token_ids == (*(3, 1, 4, 1)[:accepted], int(logits[5 * i + accepted].argmax()))
        assert list(outcome.path) == list(range(accepted))
    assert plain == Verifier().verify(logits, [a_round(3000, ())])[0], "a round without drafts is not touched"


def test_of_a_tree_one_path_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticVerifier, "length", 3.0)
    logits = torch.randn(6, V)
    (outcome,) = SyntheticVerifier().verify(logits, [a_round(0, (5, 6, 7, 8, 9), (-1, -1, 0, 1, 2))])
    assert (list(outcome.path), outcome.token_ids) == ([0, 2], (5, 7, int(logits[3].argmax())))


def test_nothing_but_a_measurement_leads_there() -> None:
    assert TargetCore.verifier_class is Verifier
    names = [name for settings in (TargetSettings, DraftSettings, GatewaySettings) for name in options_of(settings)]
    for module in (generation_service_pb2, target_service_pb2):
        names += [f.name for message in module.DESCRIPTOR.message_types_by_name.values() for f in message.fields]
    assert not [name for name in names if "synthetic" in name]

"""A prediction layer that learns: its chains, and its files."""

from pathlib import Path

import pytest
import torch

from engine.heads.files.checkpoint import read_head, write_head
from engine.heads.mtp import MtpHead
from tandem.training.mtp import create_mtp, unroll_mtp
from tests.llamas import build_llama
from tests.tandem.training.test_unroll import LENGTH, STEPS, VOCAB, make_lesson

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.inference_mode()
def test_unrolled_chains_are_those_drafted_one_at_a_time(tmp_path: Path) -> None:
    target = build_llama(vocab_size=VOCAB)
    made = create_mtp(target)
    for name, parameter in made.named_parameters():
        if name not in made.shared_names:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    lesson, size = make_lesson(made.num_features), LENGTH - STEPS
    guesses = list(unroll_mtp(made, lesson, STEPS))
    assert [guess.offset for guess in guesses] == [1, 2, 3]

    target.save_pretrained(tmp_path / "target")
    write_head(made, tmp_path / "head")
    head = read_head(tmp_path / "head", tmp_path / "target")
    assert isinstance(head, MtpHead)
    for row in range(2):
        for start in range(size):
            features = lesson.states[row, : start + 1]
            for guess in guesses:
                token_ids = lesson.rows[row, 1 : len(features) + 1]
                made_now = head(token_ids, features, torch.arange(len(features)))[-1:]
                torch.testing.assert_close(guess.logits[row, start], head.logits(made_now)[0], atol=1e-4, rtol=1e-4)
                features = torch.cat((features, made_now))

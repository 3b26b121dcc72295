"""Blocks unrolled from many positions at once against each one drafted by itself."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from engine.heads.dflash import DFlashConfig, DFlashHead, Reach
from engine.heads.dspark import DSparkConfig, DSparkHead
from engine.heads.layer import LayerConfig
from tandem.training.block import unroll_blocks
from tandem.training.lesson import Lessons, distillation_loss
from tandem.training.loss_weights import LossWeights
from tandem.training.settings import TrainSettings
from tests.engine.heads.random_heads import shaken
from tests.engine.heads.test_block_formats import attend_with

VOCAB, DRAFT_VOCAB, LENGTH, STEPS, FEATURES = 31, 23, 13, 3, 20
SHAPE = {
    "layer": LayerConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4, qk_norm=True
    ),
    "reaches": (Reach(is_causal=True, window=5), Reach()),
    "target_hidden_size": 10,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_state_layers": (1, 2),
    "mask_token_id": 30,
    "owns_embeddings": True,
    "owns_lm_head": True,
}


def make(kind):
    if kind == "dflash":
        return shaken(DFlashHead(DFlashConfig(**SHAPE, block_size=STEPS + 1)))
    spark = {"markov_rank": 6, "markov_type": kind, "has_confidence": True, "confidence_reads_token": True}
    return shaken(DSparkHead(DSparkConfig(**SHAPE, block_size=STEPS, predicts_next=True, **spark)))


@pytest.fixture
def lesson():
    generator = torch.Generator().manual_seed(3)
    return Lessons(
        rows=torch.randint(VOCAB, (2, LENGTH), generator=generator),
        top_ids=torch.randint(VOCAB, (2, LENGTH, 4), generator=generator),
        top_probs=torch.rand(2, LENGTH, 4, generator=generator) / 4,
        states=torch.randn(2, LENGTH, FEATURES, generator=generator),
    )


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("is_training", [True, False])
def test_all_blocks_at_once_are_each_block_alone(lesson, kind, is_training):
    head = make(kind).train(is_training)
    guesses = list(unroll_blocks(head, lesson, STEPS, num_anchors=4))
    starts = guesses[0].starts.tolist() if is_training else [*range(LENGTH - STEPS)]
    assert starts == sorted(set(starts))
    assert len(starts) == (4 if is_training else LENGTH - STEPS)
    for row, tokens in enumerate(lesson.rows):
        for place, start in enumerate(starts):
            ids = torch.full((head.config.block_size,), 30)
            ids[0] = tokens[start + 1]
            context = head.fuse(lesson.states[row, : start + 1])
            positions = torch.arange(start + 1 + len(ids))
            walk = head.walk(head(ids, context, positions, attend_with(head.config.reaches), torch.arange(len(ids))))
            for step, guess in enumerate(guesses):
                rows = torch.tensor([head.config.num_given + step])
                wanted = walk.step([0], rows, tokens[start + 1 + step, None])[0]
                found = head.to_target_logits(guess.logits[row, place])
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
                assert guess.offset == step + 1
            confidences = [guess.confidence[row, place] for guess in guesses if guess.confidence is not None]
            for least in (0.2, 0.5, 0.8):
                below = [bool(torch.sigmoid(each) < least) for each in confidences]
                assert walk.lengths([STEPS], least) == [below.index(True) if True in below else STEPS]


def test_the_estimate_learns_what_sampled_rounds_accept(lesson):
    logits, confidence = torch.randn(2, LENGTH, VOCAB), torch.randn(2, LENGTH)
    none, variation = LossWeights(divergence=0.0, greedy=0.0, variation=0.0), LossWeights(0.0, 0.0, 1.0)
    one = lesson.window(0, 1)
    accepted = 1 - distillation_loss(logits[:1, :1], Lessons(*(part[:1] for part in vars(one).values())), variation)
    found = distillation_loss(
        logits[:1, :1], Lessons(*(part[:1] for part in vars(one).values())), none, confidence[:1, :1]
    )
    torch.testing.assert_close(found, binary_cross_entropy_with_logits(confidence[0, 0], accepted))


def test_weights_of_the_loss():
    def of(method, **options):
        return TrainSettings(method=method, target="t", output="o", **options).loss_weights

    assert of("eagle3") == LossWeights(1.0, 0.3, 0.5)
    assert of("dspark") == LossWeights(0.0, 0.1, 1.8)
    assert of("dflash", greedy_weight=0.2) == LossWeights(1.0, 0.2, 0.0)

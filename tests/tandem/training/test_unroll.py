"""The unrolled chains against chains drafted one at a time, and the loss over a smaller vocabulary."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.heads.eagle import EagleConfig, EagleHead
from engine.heads.eagle3 import Eagle3Config, Eagle3Head
from engine.heads.layer import LayerConfig
from engine.heads.medusa import MedusaConfig, MedusaHeads
from engine.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from tandem.training.acceptance import greedy_acceptance
from tandem.training.draft_vocabulary import count_tokens, draft_ids, most_frequent
from tandem.training.lesson import Lessons, distillation_loss
from tandem.training.loss_weights import LossWeights
from tandem.training.unroll import ChainAttention, unroll_eagle, unroll_medusa, unroll_mlp

HIDDEN, VOCAB, LENGTH, STEPS = 16, 31, 9, 3
LAYER = LayerConfig(hidden_size=HIDDEN, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4)


def make_lesson(num_features: int) -> Lessons:
    generator = torch.Generator().manual_seed(3)
    return Lessons(
        rows=torch.randint(VOCAB, (2, LENGTH), generator=generator),
        top_ids=torch.randint(VOCAB, (2, LENGTH, 4), generator=generator),
        top_probs=torch.rand(2, LENGTH, 4, generator=generator) / 4,
        states=torch.randn(2, LENGTH, num_features, generator=generator),
    )


def make_head(kind: str) -> EagleHead | Eagle3Head:
    torch.manual_seed(5)
    if kind == "eagle":
        embeddings, lm_head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
        head: EagleHead | Eagle3Head = EagleHead(
            EagleConfig(layer=LAYER, vocab_size=VOCAB), embeddings=embeddings, lm_head=lm_head
        )
    else:
        is_deep = kind == "eagle3 of two layers"
        config = Eagle3Config(
            layer=replace(LAYER, qk_norm=is_deep),
            target_hidden_size=20,
            vocab_size=VOCAB,
            draft_vocab_size=13,
            hidden_state_layers=(1, 2, 3),
            num_layers=1 + is_deep,
            norm_output=is_deep,
            owns_embeddings=True,
        )
        head = Eagle3Head(config)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return head.requires_grad_(False)


class CachedAttention:
    """One chain's: every key so far is seen."""

    def __init__(self) -> None:
        self.cached: dict[int, Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """[1, 4, 4], [1, 2, 4] and [1, 2, 4]."""
        both = torch.stack((key, value))
        self.cached[layer] = torch.cat((self.cached[layer], both), 1) if layer in self.cached else both
        keys, values = self.cached[layer]
        outputs = []
        for head in range(4):
            scores = keys[:, head // 2] @ query[0, head] / 2
            outputs.append(scores.softmax(0) @ values[:, head // 2])
        return torch.stack(outputs)[None]


def draft_one(head: EagleHead | Eagle3Head, rows: Tensor, states: Tensor, start: int) -> list[Tensor]:
    """Logits of the chain from one position, fed one token at a time."""
    attend, logits = CachedAttention(), []
    features = head.fuse(states)
    for position in range(start + 1):
        x = head(rows[position + 1][None], features[position][None], torch.tensor([position]), attend)
    logits.append(head.logits(x)[0])
    for step in range(1, STEPS):
        x = head(rows[start + 1 + step][None], x, torch.tensor([start + step]), attend)
        logits.append(head.logits(x)[0])
    return logits


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3 of two layers"])
def test_unrolled_chains_are_those_drafted_one_at_a_time(kind: str) -> None:
    head = make_head(kind)
    lesson = make_lesson(HIDDEN if kind == "eagle" else 60)
    guesses = list(unroll_eagle(head, lesson, STEPS))
    assert [guess.offset for guess in guesses] == [1, 2, 3]
    size = LENGTH - STEPS
    for row in range(2):
        for start in range(size):
            alone = draft_one(head, lesson.rows[row], lesson.states[row], start)
            for guess, logits in zip(guesses, alone, strict=True):
                assert guess.logits.shape[:2] == (2, size)
                torch.testing.assert_close(guess.logits[row, start], logits, atol=1e-4, rtol=1e-4)


def test_a_chain_that_forgets_its_own_steps_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: later steps attend to the target's positions alone."""
    head, lesson = make_head("eagle3"), make_lesson(60)
    right = [guess.logits for guess in unroll_eagle(head, lesson, STEPS)]
    attend = ChainAttention.__call__

    def forget(self: ChainAttention, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        out = attend(self, query, key, value, layer)
        for parts in self._steps[layer]:
            del parts[1:]
        return out

    monkeypatch.setattr(ChainAttention, "__call__", forget)
    wrong = [guess.logits for guess in unroll_eagle(head, lesson, STEPS)]
    torch.testing.assert_close(wrong[0], right[0])
    torch.testing.assert_close(wrong[1], right[1])  # its own key is there while its step runs
    assert (wrong[2] - right[2]).abs().max() > 1e-2


def test_medusa_and_mlp_answer_for_the_same_positions() -> None:
    torch.manual_seed(7)
    lesson, size = make_lesson(HIDDEN), LENGTH - STEPS
    heads = MedusaHeads(MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=4))
    guesses = list(unroll_medusa(heads, lesson, STEPS))
    assert [guess.offset for guess in guesses] == [1, 2, 3]
    for step, guess in enumerate(guesses):
        torch.testing.assert_close(guess.logits, heads(lesson.states)[:, :size, step])
    speculator = MlpSpeculator(MlpSpeculatorConfig(emb_dim=HIDDEN, inner_dim=12, vocab_size=VOCAB, n_predict=4))
    guesses = list(unroll_mlp(speculator, lesson, STEPS))
    for row in range(2):
        for start in range(size):
            state = speculator.start(lesson.states[row, start])
            for step, guess in enumerate(guesses):
                state = speculator(lesson.rows[row, start + 1 + step], state, step)
                torch.testing.assert_close(guess.logits[row, start], speculator.logits(state, step))


def test_the_most_frequent_tokens_can_be_drafted() -> None:
    counts = count_tokens([torch.tensor([[3, 3, 1], [9, 3, 1]]), torch.tensor([9, 9, 9, 0])], 10)
    assert counts.tolist() == [1, 2, 0, 3, 0, 0, 0, 0, 0, 4]
    chosen = most_frequent(counts, 3)
    assert chosen.tolist() == [1, 3, 9]
    assert most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 9], "of equally frequent ones the smaller"
    assert draft_ids(chosen, 10).tolist() == [-1, 0, -1, 1, -1, -1, -1, -1, -1, 2]


def test_the_loss_over_a_smaller_vocabulary_is_that_of_the_renormalised_target() -> None:
    torch.manual_seed(11)
    probs = torch.randn(1, 5, 6).softmax(-1)
    best = probs.topk(6, dim=-1)
    empty = torch.empty(1, 5, 0)
    lesson = Lessons(torch.zeros(1, 5).long(), best.indices, best.values, empty)
    kept = torch.tensor([0, 2, 3, 5])
    restricted = lesson.restrict(draft_ids(kept, 6))
    logits = torch.randn(1, 5, 4)
    measured = distillation_loss(logits, restricted, LossWeights())
    losses = []
    for i in range(5):
        choice = int(probs[0, i].argmax())
        if choice not in kept.tolist():
            continue
        p = probs[0, i, kept] / probs[0, i, kept].sum()
        log_q = logits[0, i].log_softmax(-1)
        divergence = (p * (p.log() - log_q)).sum()
        greedy = -log_q[kept.tolist().index(choice)]
        losses.append(divergence + 0.3 * greedy + 0.5 * (p - log_q.exp()).abs().sum() / 2)
    assert 0 < len(losses) < 5, "some positions count and some do not"
    torch.testing.assert_close(measured, torch.stack(losses).mean(), atol=1e-4, rtol=1e-4)


def test_acceptance_is_that_of_rounds_played_out() -> None:
    generator = torch.Generator().manual_seed(13)
    hits = torch.rand(8, 40, 4, generator=generator) < 0.7
    sizes = torch.randint(0, 41, (8,), generator=generator)
    num_tokens, accepted = 0, []
    for row, size in zip(hits, sizes.tolist(), strict=True):
        position = 0
        while position < size:
            length = 0
            while length < 4 and position + length + 1 < size and row[position, length]:
                length += 1
            accepted.append(length)
            num_tokens += length + 1
            position += length + 1
    measured = greedy_acceptance(hits, sizes)
    assert measured.length == pytest.approx(num_tokens / len(accepted))
    assert measured.rates[1] == pytest.approx(sum(length > 1 for length in accepted) / len(accepted))
    assert str(measured).startswith(f"{measured.length:.2f} (0.")
    assert greedy_acceptance(hits, torch.zeros(8).long()).length == 0

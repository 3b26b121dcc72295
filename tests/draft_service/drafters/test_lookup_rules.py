"""Lookups and combinations with them under every rule: the real verifier, a Markov target, every text counted.

2 000 texts a case, 6 000 in the exhaustive run; the planted bugs fail at either.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from draft_service.drafters.base import Draft, DraftJob
from draft_service.drafters.combined import CombinedDrafter
from draft_service.drafters.lookup import NgramDrafter, SuffixDrafter
from engine.sampling.sparse import pack, unpack
from engine.sampling.state import SamplingState
from specdec.lookup.ngram import NgramIndex
from specdec.rules import Rule
from specdec.settings import SpeculativeSettings
from specdec.types import ModelInfo
from target_service.verification.rounds import Round
from target_service.verification.verifier import Verifier

V, LENGTH = 4, 3
PROMPT = (0, 1, 2, 3, 0, 1, 2, 0, 1, 2)
#: The target's logits after each token.
LOGITS = torch.tensor(np.random.default_rng(1).normal(0.0, 1.2, (V, V)), dtype=torch.float32)
ROWS = torch.softmax(LOGITS.double(), dim=-1).numpy()
SETTINGS = SpeculativeSettings(method=("suffix", "ngram"), num_speculative_tokens=3)
#: q after each token: the most likely token is the target's least likely.
Q_ROWS = [pack(np.arange(V), 20 + 13 * np.argsort(np.argsort(-row))) for row in ROWS]
Q = [weights / weights.sum() for _, weights in map(unpack, Q_ROWS)]


class Index(NgramIndex):
    """The tokens of a session, and the noise of its draws."""

    def __init__(self, spec):
        super().__init__(spec.token_ids, 1, 1)
        self.rng = np.random.default_rng([spec.params.seed, 99])
        self.rule = spec.rule


class DrawingDrafter(NgramDrafter):
    """Draws its tokens from q rows of its own, as a model does."""

    def __init__(self, settings):
        super().__init__(settings)
        self.info = ModelInfo(name="drawing", method="draft_model", num_speculative_tokens=3, vocab_size=V)

    def open(self, spec):
        return Index(spec)

    async def draft(self, batch):
        return [self.draw(job) for job in batch]

    def draw(self, job):
        job.state.ingest(job.num_rows)
        last, tokens, rows = job.state.token_ids[-1], [], []
        for _ in range(job.num_tokens):
            rows.append(Q_ROWS[last])
            last = int(job.state.rng.choice(V, p=Q[last]))
            tokens.append(last)
        return Draft(tuple(tokens), () if job.state.rule is Rule.COUPLED else tuple(rows))


class AnyMatch(NgramDrafter):
    """Takes a match of two tokens for long: about every other round has one here."""

    long_match = 2


def combined(lookup, drafter_class=CombinedDrafter):
    return drafter_class(lookup, DrawingDrafter(SETTINGS), SETTINGS)


DRAFTERS = {
    "ngram": lambda: NgramDrafter(SETTINGS),
    "suffix": lambda: SuffixDrafter(SETTINGS),
    "drawing": lambda: DrawingDrafter(SETTINGS),
    "ngram and drawing": lambda: combined(AnyMatch(SETTINGS)),
    "ngram and suffix": lambda: CombinedDrafter(AnyMatch(SETTINGS), SuffixDrafter(SETTINGS), SETTINGS),
}


async def play(drafter, openings, *, length=LENGTH, k=3):
    """Texts of sessions in step, each committed round by round as the real verifier says."""
    states = [drafter.open(opening) for opening in openings]
    samplings = [SamplingState(o.params, o.token_ids, o.prompt_len, V) for o in openings]
    num_proposed = 0
    for _ in range(length):
        while any(state.num_pending for state in states):
            await drafter.draft([DraftJob(state, state.num_pending, 0) for state in states])
        drafts = await drafter.draft([DraftJob(state, 0, k) for state in states])
        num_proposed += sum(len(draft.token_ids) for draft in drafts)
        rows, rounds = [], []
        for opening, sampling, draft in zip(openings, samplings, drafts, strict=True):
            rounds.append(Round(sampling, opening.rule, len(rows), draft.token_ids, draft.q_rows))
            rows += [sampling.token_ids[-1], *draft.token_ids]
        for state, sampling, outcome in zip(states, samplings, Verifier().verify(LOGITS[rows], rounds), strict=True):
            assert outcome.error is None
            drafter.advance(state, len(sampling), outcome.token_ids)
            sampling.commit(outcome.token_ids)
    for state in states:
        drafter.close(state)
    assert num_proposed
    return [tuple(sampling.token_ids[len(PROMPT) : len(PROMPT) + length]) for sampling in samplings]


def p_value(texts):
    """Of the joint distribution of the texts' tokens under the target."""
    counts = Counter(texts)
    observed, expected = [], []
    for text in itertools.product(range(V), repeat=len(texts[0])):
        steps = itertools.pairwise((PROMPT[-1], *text))
        observed.append(counts[text])
        expected.append(len(texts) * np.prod([ROWS[step] for step in steps]))
    observed, expected = np.array(observed), np.array(expected)
    few = expected < 5
    pooled = [(*cells[~few], *([cells[few].sum()] if few.any() else [])) for cells in (observed, expected)]
    return stats.chisquare(*pooled, sum_check=False).pvalue


@pytest.fixture(params=[2000, pytest.param(6000, marks=pytest.mark.exhaustive)])
def trials(request):
    return request.param


async def texts_of(drafter, spec, rule, trials):
    texts = []
    for start in range(0, trials, 500):
        openings = [
            spec(PROMPT, temperature=1.0, rule=rule, seed=seed, session_id=str(seed), num_speculative_tokens=3)
            for seed in range(start, start + 500)
        ]
        texts += await play(drafter, openings)
    return texts


@pytest.mark.parametrize(
    ("name", "rule"),
    [  # each drafter under one rule, and under both in the exhaustive run
        pytest.param(name, rule, marks=() if i % 2 == j else pytest.mark.exhaustive)
        for i, name in enumerate(DRAFTERS)
        for j, rule in enumerate([Rule.TOKEN, Rule.BLOCK])
    ],
)
async def test_ratio_rules_keep_the_targets_distribution(spec, name, rule, trials):
    assert p_value(await texts_of(DRAFTERS[name](), spec, rule, trials)) > 1e-3


@pytest.mark.parametrize("name", DRAFTERS)
async def test_coupled_text_is_a_function_of_the_seed(spec, name):
    texts = await texts_of(DRAFTERS[name](), spec, Rule.COUPLED, trials=500)
    plain = await texts_of(DRAFTERS["drawing"](), spec, Rule.COUPLED, trials=500)
    assert texts == plain


class PeekingDrafter(CombinedDrafter):
    """Planted: draws first, and looks up where the drawn token is not the one that it would find."""

    async def draft(self, batch):
        if not batch[0].num_tokens:
            return await super().draft(batch)
        jobs = [DraftJob(job.state.other, job.state.other.num_pending, job.num_tokens) for job in batch]
        drawn = await self._other.draft(jobs)
        found = [self._lookup.look_up(job.state.lookup, job.num_tokens).token_ids for job in batch]
        pairs = zip(drawn, found, strict=True)
        return [Draft(tokens) if tokens[:1] != draft.token_ids[:1] else draft for draft, tokens in pairs]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_a_choice_that_looks_at_the_draw_is_noticed(spec, rule, trials):
    assert p_value(await texts_of(combined(AnyMatch(SETTINGS), PeekingDrafter), spec, rule, trials)) < 1e-9


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_what_was_written_with_the_same_noise_is_no_draft(spec, is_guarded, trials):
    """Two requests of one seed: the second one's text has the target's distribution, too, unless the guard is off."""
    texts = []
    for seed in range(trials // 2):
        drafter = SuffixDrafter(SETTINGS)
        opening = spec(PROMPT, temperature=1.0, rule=Rule.TOKEN, seed=seed)
        await play(drafter, [opening], length=2, k=1)
        if not is_guarded:
            drafter.lookup.past.of("").has_seed = lambda seed: False
        (text,) = await play(drafter, [opening], length=2, k=1)
        texts.append(text)
    p = p_value(texts)
    assert p > 1e-3 if is_guarded else p < 1e-9


async def test_other_seeds_learn_from_past_outputs(spec):
    drafter = SuffixDrafter(SETTINGS)
    for seed, token in ((1, 7), (2, 8)):
        state = drafter.open(spec([5, 6], temperature=1.0, rule=Rule.TOKEN, seed=seed))
        drafter.advance(state, 2, [5, 6, token, 9])
        drafter.close(state)
    for seed, rule, wanted in ((3, Rule.TOKEN, (8, 9)), (1, Rule.TOKEN, ()), (1, Rule.COUPLED, (8, 9))):
        state = drafter.open(spec([4, 5, 6], temperature=1.0, rule=rule, seed=seed))
        (draft,) = await drafter.draft([DraftJob(state, 3, 2)])
        assert draft.token_ids == wanted

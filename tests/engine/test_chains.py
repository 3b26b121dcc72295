"""Chains of drafted tokens: the native loop against the same steps in torch, and what both promise."""

from dataclasses import replace

import numpy as np
import pytest

from engine import chains
from engine.chain_job import ChainJob
from engine.native.runner import NativeRunner
from engine.sampling import sparse
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule

SAMPLED = {
    "plain": {"temperature": 1.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 7},
    "top-k above the vocabulary": {"temperature": 1.3, "top_k": 4000},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
}
RULES = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
MASK = 90


@pytest.fixture
def make_jobs(llama, tools):
    """Jobs on prompts of several lengths; their sequences are released at the end."""
    sequences = []

    def make(count, num_tokens=5, *, rule=Rule.BLOCK, prompt_len=6, **params):
        jobs = []
        for i in range(count):
            prompt = tools.random_ids(prompt_len + i, seed=i)
            sequences.append(llama.pool.open(len(prompt) + 12))
            sampling = SamplingParams(seed=100 + i, max_tokens=12, **params)
            state = SamplingState(sampling, prompt, len(prompt), llama.info.vocab_size)
            jobs.append(ChainJob(sequences[-1], prompt, num_tokens, state, rule))
        return jobs

    yield make
    for sequence in sequences:
        llama.pool.release(sequence)


def in_torch(engine, jobs, stop=None):
    return chains.draft_in_torch(engine, jobs, stop)


def natively(engine, jobs, stop=None):
    assert isinstance(engine.runner, NativeRunner)
    return chains.draft_chains(engine, jobs, stop)


def lengths(jobs):
    return [job.sequence.length for job in jobs]


def rewind(engine, jobs):
    for job in jobs:
        engine.pool.rollback(job.sequence, 0)


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("rule", RULES)
def test_native_chains_are_those_of_torch(llama, make_jobs, rule, params):
    jobs = make_jobs(5, rule=rule, **params)
    native = natively(llama, jobs)
    grown = lengths(jobs)
    rewind(llama, jobs)
    assert native == in_torch(llama, jobs)
    assert grown == lengths(jobs) == [len(job.token_ids) + 4 for job in jobs]
    assert all(len(chain.q_rows) == (0 if rule is Rule.COUPLED else 5) for chain in native)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, SAMPLED["all"] | {"presence_penalty": 0.5}], ids=["greedy", "edits"]
)
@pytest.mark.parametrize("rule", RULES)
def test_chains_drafted_in_parallel_are_those_of_torch(llama, make_jobs, rule, params):
    """Of several lengths beside jobs that only ingest; the entries of masks are dropped."""
    made = zip(make_jobs(5, rule=rule, **params), (5, 0, 1, 2, 5), strict=True)
    jobs = [replace(job, num_tokens=n, mask_token_id=MASK) for job, n in made]
    native = natively(llama, jobs)
    grown = lengths(jobs)
    rewind(llama, jobs)
    assert native == in_torch(llama, jobs)
    assert grown == lengths(jobs) == [len(job.token_ids) for job in jobs]
    assert [len(chain.token_ids) for chain in native] == [5, 0, 1, 2, 5]


@pytest.mark.parametrize("run", [natively, in_torch])
def test_the_tokens_of_a_parallel_chain_are_the_masks_argmax(llama, stock_llama, make_jobs, tools, run):
    jobs = [replace(job, mask_token_id=MASK) for job in make_jobs(3, temperature=0.0)]
    for job, chain in zip(jobs, run(llama, jobs), strict=True):
        rows = tools.stock_logits(stock_llama, [*job.token_ids, *[MASK] * 4])[-5:]
        assert list(chain.token_ids) == rows.argmax(-1).tolist()
    # What is fed next stands where the first mask stood.
    again = run(llama, [replace(job, token_ids=chain.token_ids[:1]) for job in jobs])
    for job, next_chain in zip(jobs, again, strict=True):
        rows = tools.stock_logits(stock_llama, [*job.token_ids, chain.token_ids[0], *[MASK] * 4])[-5:]
        assert list(next_chain.token_ids) == rows.argmax(-1).tolist()


def test_greedy_chains_follow_the_argmax(llama, stock_llama, make_jobs, tools):
    jobs = make_jobs(3, temperature=0.0)
    for job, chain in zip(jobs, chains.draft_chains(llama, jobs), strict=True):
        text = list(job.token_ids)
        for token in chain.token_ids:
            assert token == int(tools.stock_logits(stock_llama, text)[-1].argmax())
            text.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_does_not_depend_on_its_batch(llama, make_jobs, temperature):
    jobs = make_jobs(6, temperature=temperature)
    together = chains.draft_chains(llama, jobs)
    for i, job in enumerate(jobs):
        rewind(llama, [job])
        assert chains.draft_chains(llama, [job]) == [together[i]]


def test_chains_of_several_lengths_and_jobs_that_only_ingest(llama, make_jobs):
    jobs = [replace(job, num_tokens=n) for job, n in zip(make_jobs(4, temperature=1.0), (3, 0, 1, 5), strict=True)]
    native = chains.draft_chains(llama, jobs)
    assert [len(chain.token_ids) for chain in native] == [3, 0, 1, 5]
    assert [job.sequence.length - len(job.token_ids) for job in jobs] == [2, 0, 0, 4]
    rewind(llama, jobs)
    assert native == in_torch(llama, jobs)


def test_rows_that_edit_logits_are_drafted_beside_others(llama, make_jobs):
    plain = make_jobs(2, temperature=0.0)
    allowed = make_jobs(1, temperature=0.0, allowed_token_ids=(5,))
    jobs = [plain[0], *allowed, plain[1]]
    drafted = chains.draft_chains(llama, jobs)
    assert drafted[1].token_ids == (5,) * 5
    rewind(llama, jobs)
    assert drafted == in_torch(llama, jobs)


@pytest.mark.parametrize("run", [natively, in_torch])
def test_a_raised_flag_ends_a_chain_at_the_next_step(llama, make_jobs, run):
    jobs = make_jobs(3, temperature=0.0)
    whole = run(llama, jobs)
    rewind(llama, jobs)
    stopped = run(llama, jobs, np.array([0, 1, 0], dtype=np.int32))
    assert stopped[1].token_ids == whole[1].token_ids[:1]
    assert [stopped[0], stopped[2]] == [whole[0], whole[2]]
    assert [job.sequence.length - len(job.token_ids) for job in jobs] == [4, 0, 4]


def test_drafting_goes_on_where_a_chain_ended(llama, make_jobs):
    """Two chains of 3, the second after the first, are one chain of 6 under every rule that shares its noise."""
    (job,) = make_jobs(1, 6, rule=Rule.COUPLED, temperature=1.0)
    (whole,) = chains.draft_chains(llama, [job])
    rewind(llama, [job])
    (first,) = chains.draft_chains(llama, [replace(job, num_tokens=3)])
    state = job.state.committed(len(job.state), first.token_ids)
    rest = replace(job, token_ids=first.token_ids[-1:], num_tokens=3, state=state)
    (second,) = chains.draft_chains(llama, [rest])
    assert first.token_ids + second.token_ids == whole.token_ids


def test_a_chain_that_outgrows_its_sequence_is_refused(llama, make_jobs):
    (job,) = make_jobs(1, 20, temperature=0.0)
    with pytest.raises(ValueError, match="20 drafted tokens after 6 entries exceed the 20"):
        chains.draft_chains(llama, [job])
    assert job.sequence.length == 0


def test_an_unknown_token_is_refused(llama, make_jobs, tools):
    (job,) = make_jobs(1, temperature=0.0)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        chains.draft_chains(llama, [replace(job, token_ids=[tools.vocab])])


def test_a_sequence_released_under_a_batch_harms_nobody(llama, make_jobs):
    jobs = make_jobs(2, temperature=0.0)
    (expected, _) = chains.draft_chains(llama, jobs)
    rewind(llama, jobs)
    llama.pool.release(jobs[1].sequence)
    assert chains.draft_chains(llama, jobs)[0] == expected


def test_tokens_are_drawn_from_the_row_that_is_sent(llama, make_jobs):
    """χ² of the first token over many seeds against the weights of its row."""
    (job,) = make_jobs(1, 1, temperature=1.2)
    counts = {}
    for seed in range(2000):
        params = replace(job.state.params, seed=seed)
        state = SamplingState(params, job.token_ids, len(job.token_ids), llama.info.vocab_size)
        rewind(llama, [job])
        (chain,) = chains.draft_chains(llama, [replace(job, state=state)])
        counts[chain.token_ids[0]] = counts.get(chain.token_ids[0], 0) + 1
    ids, weights = sparse.unpack(chain.q_rows[0])
    expected = 2000 * weights / weights.sum()
    observed = np.array([counts.get(int(token), 0) for token in ids])
    assert observed.sum() == 2000
    common = expected >= 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    assert degrees > 5
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)

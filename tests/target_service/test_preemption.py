"""Sessions that lose their blocks to others, and come back: their texts are those of a target with room for all."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from specdec.errors import Unavailable
from specdec.rules import Rule
from specdec.settings import ModelSettings, TargetSettings
from specdec.types import Proposal
from target_service import sequence_memory
from target_service.core import TargetCore
from target_service.sequence_memory import SequenceMemory
from tests.hybrids import KINDS, save_hybrid
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, multi_step_decode, until_clean
from tests.target_service.test_hidden_states import LAYERS
from tests.until import until


class TakesBlocksAtRandom(SequenceMemory):
    """Any session that is in no step may lose its blocks before any step, any number of times."""

    rng = random.Random(0)

    def come_back(self):
        for holding in self._holdings.values():
            if holding.can_be_preempted and self.rng.random() < 0.3:
                holding.num_preemptions = 0
                self._take_from(holding)
        super().come_back()


#: Blocks of 16 tokens: room for two or three of the sessions below at their full length.
FEW_BLOCKS = 12
NUM_TOKENS = 60


async def in_rounds(session, seed, *, trees=False):
    """All tokens of a session, their log-probabilities and hidden states: rounds of random proposals, and multi-step
    decode now and then.
    """
    rng = random.Random(seed)
    verdict = session.first
    tokens, scores, states = [*verdict.token_ids], [*verdict.logprobs], [*verdict.hidden_states]
    while verdict.finish_reason is None:
        n = session.committed_len
        until_len = n + 1
        if rng.random() < 0.3:
            until_len = n + rng.randint(1, 7)
            session.multi_step_decode(n, until_len - n)
        else:
            k = rng.randint(0, 5)
            drafted = tuple(rng.sample(range(VOCAB), k))
            parents = tuple(rng.randrange(-1, i) for i in range(k)) if trees else ()
            session.offer(Proposal(session.spec.epoch, n, drafted, parents=parents))
        while verdict.finish_reason is None and verdict.committed_len < until_len:
            verdict = await session.receive()
            tokens += verdict.token_ids
            scores += verdict.logprobs
            states += verdict.hidden_states
    return tuple(tokens), tuple(scores), tuple(states)


async def run_all(core, specs, *, trees=False):
    async def run(number, spec):
        session = await core.open(spec)
        try:
            opened = session.opened.prompt_logprobs
            return opened, await in_rounds(session, number, trees=trees)
        finally:
            await session.close()

    return await asyncio.gather(*(run(number, spec) for number, spec in enumerate(specs)))


def specs_of(**given):
    return [
        make_spec(make_prompt(number, 20 + 5 * number), NUM_TOKENS, session_id=str(number), seed=number, **given)
        for number in range(6)
    ]


@pytest.mark.parametrize(
    ("given", "trees"),
    [
        ({}, False),
        ({"rule": Rule.COUPLED}, True),
        ({"temperature": 0.9, "rule": Rule.COUPLED}, False),
        ({"temperature": 0.9, "rule": Rule.COUPLED, "logprobs": 3, "prompt_logprobs": 2}, False),
        ({"temperature": 1.2, "rule": Rule.COUPLED, "repetition_penalty": 1.3, "min_tokens": 50}, False),
        ({"hidden_state_layers": LAYERS, "rule": Rule.COUPLED}, False),
    ],
    ids=["greedy", "trees", "seeded", "logprobs", "penalties", "states"],
)
async def test_texts_are_those_of_a_target_with_room_for_all(start_core, given, trees):
    specs = specs_of(**given)
    async with start_core() as core:
        expected = await run_all(core, specs, trees=trees)
        assert (await core.load()).preemptions == 0
    async with start_core(kv_blocks=FEW_BLOCKS) as core:
        got = await run_all(core, specs, trees=trees)
        assert (await core.load()).preemptions > 0
    for (prompt_scores, (tokens, scores, states)), (other_prompt, (text, others, other_states)) in zip(
        expected, got, strict=True
    ):
        assert tokens == text
        assert len(text) == NUM_TOKENS
        assert (prompt_scores, scores) == (other_prompt, others)
        assert rows_of(states) == rows_of(other_states)


def rows_of(states):
    """Each position's hidden states, however they were cut."""
    rows = {}
    for block in states:
        for position in range(block.start, block.end):
            rows[position] = block.rows(position, position + 1).data
    return rows


async def test_a_session_goes_on_in_the_middle_of_multi_step_decode(start_core, plain):
    prompts = [make_prompt(seed, 20) for seed in range(5)]
    async with start_core(kv_blocks=FEW_BLOCKS) as core:

        async def run(prompt):
            session = await core.open(make_spec(prompt, 100))
            text = (*session.first.token_ids, *await multi_step_decode(session, 21, 99))
            await session.close()
            return text

        texts = await asyncio.gather(*map(run, prompts))
        assert (await core.load()).preemptions > 0
        assert texts == [plain(prompt, 100) for prompt in prompts]


async def test_the_oldest_session_never_loses_its_blocks_to_its_own_client(start_core, plain):
    prompts = [make_prompt(seed, 20) for seed in range(4)]
    async with start_core(kv_blocks=8) as core:
        sessions = [await core.open(make_spec(prompt, 60)) for prompt in prompts[:3]]
        tasks = [asyncio.create_task(multi_step_decode(session, 21, 59)) for session in sessions]
        await tasks[0]
        assert (await core.load()).preemptions > 0
        assert sessions[0].num_preemptions == 0
        texts = [(*session.first.token_ids, *await task) for session, task in zip(sessions, tasks, strict=True)]
        assert texts == [plain(prompt, 60) for prompt in prompts[:3]]
        for session in sessions:
            await session.close()


async def test_a_client_gets_its_fair_share(start_core, plain):
    """The client with the most blocks gives up those of its youngest session, however young the others' are."""
    async with start_core(kv_blocks=10) as core:
        mine = [await core.open(make_spec(make_prompt(seed, 30), 60, client="many")) for seed in range(3)]
        other = await core.open(make_spec(make_prompt(9, 30), 100, client="one"))
        first = await multi_step_decode(other, 31, 40)
        assert [session.num_preemptions for session in (*mine, other)] == [0, 0, 1, 0]
        text = (*other.first.token_ids, *first, *await multi_step_decode(other, 71, 59))
        assert text == plain(make_prompt(9, 30), 100)
        await other.close()
        for seed, session in enumerate(mine):
            got = (*session.first.token_ids, *await multi_step_decode(session, 31, 59))
            assert got == plain(make_prompt(seed, 30), 60)
            await session.close()


async def test_new_sessions_wait_for_those_that_lost_their_blocks(start_core, monkeypatch):
    waiting, sessions, admit = [], [], SequenceMemory.admit

    def watched(memory, *args, **given):
        sequence = admit(memory, *args, **given)
        waiting.append(
            [session for session in sessions if session.finish_reason is None and is_waiting(memory, session)]
        )
        return sequence

    def is_waiting(memory, session):
        return memory.is_waiting(session.step_session.sequence)

    async with start_core(kv_blocks=8) as core:
        sessions += [await core.open(make_spec(make_prompt(seed, 30), 60)) for seed in range(3)]
        tasks = [asyncio.create_task(multi_step_decode(session, 31, 59)) for session in sessions]
        await until(lambda: core.memory.num_preemptions)
        monkeypatch.setattr(SequenceMemory, "admit", watched)
        newcomer = asyncio.create_task(core.open(make_spec(make_prompt(7, 10), 4)))
        await asyncio.sleep(0)
        assert not newcomer.done()
        for session, task in zip(sessions, tasks, strict=True):
            await task
            await session.close()
        await (await newcomer).close()
        assert waiting == [[]]


@pytest.mark.parametrize("how", ["end", "cancel"])
async def test_a_session_that_waits_for_its_blocks_can_leave(start_core, plain, how):
    async with start_core(kv_blocks=6) as core:
        first, second = [await core.open(make_spec(make_prompt(seed, 30), 60)) for seed in range(2)]
        tasks = [asyncio.create_task(multi_step_decode(session, 31, 59)) for session in (first, second)]
        await until(lambda: core.memory.is_waiting(second.step_session.sequence))
        if how == "end":
            second.end()
            with pytest.raises(Unavailable, match="closed"):
                await tasks[1]
        else:
            tasks[1].cancel()
            await asyncio.wait([tasks[1]])
            await second.close()
        await tasks[0]
        await first.close()
        await until_clean(core)


async def test_a_session_that_lost_its_blocks_comes_back_with_room_to_double(start_core, monkeypatch, plain):
    monkeypatch.setattr(sequence_memory, "MAX_PREEMPTIONS", 1)
    prompts = [make_prompt(seed, 20) for seed in range(6)]
    async with start_core(kv_blocks=FEW_BLOCKS) as core:

        async def run(prompt):
            session = await core.open(make_spec(prompt, 100))
            text = (*session.first.token_ids, *await multi_step_decode(session, 21, 99))
            assert session.num_preemptions <= 1 + 3, "once, and as often as 20 tokens double up to 120"
            await session.close()
            return text

        assert await asyncio.gather(*map(run, prompts)) == [plain(prompt, 100) for prompt in prompts]
        assert (await core.load()).preemptions > 0


async def test_a_prompt_that_was_fed_in_part_starts_again(start_core, plain):
    """A session that decodes takes the blocks of a prompt beside it."""
    async with start_core(kv_blocks=10, max_num_batched_tokens=16) as core:
        first = await core.open(make_spec(make_prompt(0, 60), 90))
        task = asyncio.create_task(multi_step_decode(first, 61, 89))
        opening = [asyncio.create_task(core.open(make_spec(make_prompt(1, 70), 20))) for _ in range(1)]
        await task
        second = await opening[0]
        assert (*second.first.token_ids, *await multi_step_decode(second, 71, 19)) == plain(make_prompt(1, 70), 20)
        await first.close()
        await second.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_recurrent_states_are_computed_again(kind, tmp_path, monkeypatch):
    """Sessions that lose their blocks at random have the texts of undisturbed ones, in rounds and without."""
    folder = save_hybrid(tmp_path, kind)

    async def texts() -> tuple[list[tuple[int, ...]], int]:
        model = ModelSettings(model=folder, dtype="float32", num_threads=1, kv_cache_memory_bytes=2**24)
        core = await TargetCore.start(TargetSettings(model=model))
        try:
            specs = [
                make_spec(
                    make_prompt(seed, 20 + seed), 40, session_id=str(seed), seed=seed, temperature=0.8 * (seed % 2)
                )
                for seed in range(4)
            ]
            done = await run_all(core, [replace(spec, rule=Rule.COUPLED) for spec in specs])
            return [tokens for _, (tokens, _, _) in done], core.memory.num_preemptions
        finally:
            await core.close()

    expected, _ = await texts()
    monkeypatch.setattr("target_service.core.SequenceMemory", TakesBlocksAtRandom)
    got, num_preemptions = await texts()
    assert got == expected
    assert num_preemptions > 5

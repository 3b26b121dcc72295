"""Suffix decoding as a drafter: its text, past outputs, and their limits."""

import asyncio
import os
import subprocess
import sys

import pytest

from draft_service.drafters.lookup import SuffixDrafter
from specdec.errors import InvalidRequest
from specdec.lookup import past_outputs, suffix_tree
from specdec.settings import SpeculativeSettings
from tests.draft_service.proposing import propose


async def settled(core):
    """Wait until past outputs are in the tree: 1024 tokens in each iteration of the loop."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert core.drafter.lookup.past.of("").cache.is_up_to_date


async def test_past_outputs_are_shared_and_prompts_are_not(start_core, spec):
    async with start_core("suffix", k=8) as core:
        first = await core.open(spec([50, 51, 52], session_id="a"))
        await propose(first, 3, [10, 11, 12, 13, 14], 0)
        await first.close()
        await settled(core)
        second = await core.open(spec([7, 10, 11], session_id="b"))
        assert (await propose(second, 3, [12], 8)).token_ids == (13, 14)
        assert (await propose(second, 4, [50, 51], 8)).token_ids == ()
        await second.close()


async def test_past_outputs_of_another_owner_are_no_drafts(start_core, spec):
    async with start_core("suffix", k=8) as core:
        first = await core.open(spec([1], session_id="a", owner="alice"))
        await propose(first, 1, [10, 11, 12, 13, 14], 0)
        await first.close()
        for owner, drafted in (("alice", (13, 14)), ("bob", ()), ("", ())):
            session = await core.open(spec([7, 10, 11], session_id=f"b{owner}", owner=owner))
            assert (await propose(session, 3, [12], 8)).token_ids == drafted
            await session.close()


async def test_all_owners_together_keep_as_much_as_one(start_core, spec, monkeypatch):
    monkeypatch.setattr(past_outputs, "MAX_CACHED_TOKENS", 10)
    async with start_core("suffix", k=8) as core:
        for owner in ("alice", "bob", "carol"):
            session = await core.open(spec([1], session_id=owner, owner=owner))
            await propose(session, 1, [10, 11, 12, 13], 0)
            await session.close()
        sizes = {owner: core.drafter.lookup.past.of(owner).cache.size.num_tokens for owner in ("alice", "bob", "carol")}
        assert sizes == {"alice": 0, "bob": 4, "carol": 4}


async def test_the_oldest_outputs_go_first(start_core, spec):
    async with start_core("suffix", k=8, suffix_decoding_max_cached_requests=2) as core:
        for number in range(4):
            session = await core.open(spec([1], session_id=str(number)))
            await propose(session, 1, [100 + number, 200 + number, 300 + number], 0)
            await session.close()
        await settled(core)
        assert core.drafter.lookup.past.of("").cache.size.num_requests == 2
        session = await core.open(spec([1, 2], session_id="x"))
        drafts = [(await propose(session, 2, [100 + number, 200 + number], 4)).token_ids for number in range(4)]
        assert drafts == [(), (), (302,), (303,)]
        await session.close()


async def test_nothing_is_kept_of_requests_where_that_is_off(start_core, spec):
    async with start_core("suffix", k=8, suffix_decoding_max_cached_requests=0) as core:
        session = await core.open(spec([1]))
        await propose(session, 1, [2, 3, 4], 0)
        await session.close()
        assert core.drafter.lookup.past.of("").cache.size.num_tokens == 0


async def test_long_outputs_go_into_the_tree_by_and_by(start_core, spec):
    async with start_core("suffix", k=8) as core:
        session = await core.open(spec([1], max_tokens=None))
        await propose(session, 1, list(range(2, 40_002)), 0)
        await session.close()
        past = core.drafter.lookup.past.of("").cache
        assert not past.is_up_to_date
        assert past.count([20_000, 20_001]) == 0
        await settled(core)
        assert past.count([20_000, 20_001]) == 1


def test_options_of_vllm_reach_the_trees(spec):
    settings = SpeculativeSettings(
        method="suffix",
        suffix_decoding_max_tree_depth=4,
        suffix_decoding_max_spec_factor=3.0,
        suffix_decoding_min_token_prob=0.6,
    )
    drafter = SuffixDrafter(settings)
    state = drafter.open(spec([1, 2, 3, 4, 1]))
    state.ingest(5)
    assert drafter.look_up(state, 8).token_ids == ()  # once of two times, below 0.6
    past = drafter.lookup.past.of("").cache
    past.add([1, 2, 3, 4, 5])
    past.apply_pending(100)
    assert drafter.look_up(state, 8).token_ids == (2, 3, 4)  # of one token three times as many; the tree is 4 deep


def test_without_a_compiler_the_method_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    suffix_tree.load.cache_clear()
    with pytest.raises(InvalidRequest, match='"suffix" cannot be used here'):
        SuffixDrafter(SpeculativeSettings(method="suffix"))


def test_no_torch():
    """The service with this method never imports torch."""
    code = (
        "import asyncio, sys; from draft_service.drafters.registry import load_drafter;"
        "from specdec.settings import *;"
        "asyncio.run(load_drafter(DraftSettings(speculative=SpeculativeSettings(method=('suffix', 'ngram')))));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))

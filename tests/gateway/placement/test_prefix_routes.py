"""A prompt goes to the target that has its beginning."""

from __future__ import annotations

import asyncio

import pytest

from gateway.placement.prefix_routes import BLOCK_SIZE, MAX_TOKENS_AT_ONCE, PrefixRoutes, hash_prefixes
from gateway.placement.routing import MAX_EXCESS_USE, Replica, Router
from gateway.requests.types import GenerationRequest
from specdec.params import SamplingParams
from specdec.types import ServerLoad
from tests.gateway.fakes import FakeTarget, target_info


def text(num_blocks, first=0):
    return list(range(first, first + num_blocks * BLOCK_SIZE))


async def test_the_target_of_the_longest_prefix_is_found():
    routes = PrefixRoutes()
    routes.note(await hash_prefixes("a", text(4)), "one")
    routes.note(await hash_prefixes("a", [*text(2), *text(3, first=10_000)]), "two")
    assert routes.find(await hash_prefixes("a", [*text(4), 7, 8])) == "one"
    assert routes.find(await hash_prefixes("a", [*text(2), *text(2, first=10_000)])) == "two"
    assert routes.find(await hash_prefixes("a", [*text(2), 7, 8])) == "two", "the latest one"
    assert routes.find(await hash_prefixes("a", text(1, first=500))) is None
    assert routes.find(await hash_prefixes("b", text(4))) is None, "another scope"
    assert routes.find(()) is None


async def test_a_long_prompt_is_hashed_in_slices():
    tokens, slices = list(range(4 * MAX_TOKENS_AT_ONCE + 40)), 0

    async def count():
        nonlocal slices
        while True:
            slices += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(count())
    hashes = await hash_prefixes("a", tokens)
    beside.cancel()
    assert slices >= 4
    assert len(hashes) == len(set(hashes)) == len(tokens) // BLOCK_SIZE
    for num_blocks in (1, 3, MAX_TOKENS_AT_ONCE // BLOCK_SIZE, MAX_TOKENS_AT_ONCE // BLOCK_SIZE + 1):
        assert await hash_prefixes("a", tokens[: num_blocks * BLOCK_SIZE + 5]) == hashes[:num_blocks]


async def test_what_is_kept_is_bounded():
    routes = PrefixRoutes(max_prefixes=10)
    for index in range(20):
        routes.note(await hash_prefixes("a", text(3, first=1000 * index)), str(index))
    assert len(routes) == 10
    found = [routes.find(await hash_prefixes("a", text(3, first=1000 * index))) for index in range(20)]
    assert found == [None] * 16 + ["16", "17", "18", "19"], "of the sixteenth the shortest prefix is left"


@pytest.fixture
def router():
    targets = [Replica(f"host{i}:1", FakeTarget(), info=target_info()) for i in range(3)]
    return Router(targets)


async def test_prompts_that_begin_alike_go_to_one_target(router):
    prefixes = await hash_prefixes("a", text(3))
    first = router.pick_target("first", is_bound=False, prefixes=prefixes)
    for replica in router.targets.replicas:
        replica.note_load(ServerLoad(open_sessions=1, used_blocks=10, total_blocks=100))
    for i in range(9):
        for replica in router.targets.replicas:
            replica.note_load(ServerLoad(open_sessions=1, used_blocks=10, total_blocks=100))
        assert router.pick_target(str(i), is_bound=False, prefixes=prefixes[:2]) is first


async def test_a_target_that_is_too_full_or_lost_gives_prompts_to_others(router):
    prefixes = await hash_prefixes("a", text(3))
    home = router.pick_target("first", is_bound=False, prefixes=prefixes)

    def tell(used_blocks):
        for replica in router.targets.replicas:
            used = used_blocks if replica is home else 0
            replica.note_load(ServerLoad(open_sessions=1, used_blocks=used, total_blocks=100))

    tell(int(100 * MAX_EXCESS_USE))
    assert router.pick_target("second", is_bound=False, prefixes=prefixes) is home
    tell(int(100 * MAX_EXCESS_USE) + 1)
    other = router.pick_target("third", is_bound=False, prefixes=prefixes)
    assert other is not home
    tell(0)
    assert router.pick_target("fourth", is_bound=False, prefixes=prefixes) is other, "it has the beginning now, too"
    router.down(other, "gone")
    assert router.pick_target("fifth", is_bound=False, prefixes=prefixes) is not other
    router.targets.replicas[0].avoid()


async def test_a_session_with_a_name_goes_where_its_name_leads(router):
    prefixes = await hash_prefixes("a", text(3))
    home = router.pick_target("first", is_bound=False, prefixes=prefixes)
    named = {router.pick_target(str(i), prefixes=prefixes).name for i in range(30)}
    assert named - {home.name}


async def ask(generation, prompt, **fields):
    await generation.generate(GenerationRequest(prompt=tuple(prompt), params=SamplingParams(max_tokens=8), **fields))


async def test_a_conversation_without_a_name_stays_at_its_cache(backends, make_generation, script, info):
    targets, _ = backends
    targets.append(FakeTarget(next_token=script, info=info))
    generation = make_generation()
    for replica in generation.router.targets.replicas:
        replica.note_load(ServerLoad(total_blocks=1000))
    prompt = text(3)
    for _ in range(8):
        await ask(generation, prompt)
        prompt = [*prompt, 9, 9]
    assert len([target for target in targets if target.specs]) == 1
    specs = [spec for target in targets for spec in target.specs]
    assert len({spec.session_id for spec in specs}) == 8
    assert not any(spec.is_named for spec in specs)


async def test_samples_of_one_prompt_go_to_one_target(backends, make_generation, script, info):
    targets, _ = backends
    targets.append(FakeTarget(next_token=script, info=info))
    generation = make_generation()
    for replica in generation.router.targets.replicas:
        replica.note_load(ServerLoad(total_blocks=1000))
    request = GenerationRequest(prompt=tuple(text(3)), params=SamplingParams(max_tokens=8, n=6), session_id="mine")
    await generation.generate(request)
    assert sorted(len(target.specs) for target in targets) == [0, 6]
    assert sum(spec.is_named for target in targets for spec in target.specs) == 1

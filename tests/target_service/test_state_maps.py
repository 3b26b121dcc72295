"""First layers of heads that drafts send: who may hold how much, what is given up, and what is refused."""

import asyncio

import pytest
import torch

from engine.heads.files.packed_state_map import pack_state_map
from engine.loading import memory
from engine.state_map import StateMap
from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded
from specdec.v1.types_pb2 import StateMapPart
from target_service import state_map_intake
from target_service.state_maps import StateMaps
from tests.engine.heads.random_heads import eagle3
from tests.target_service.conftest import VOCAB, make_prompt, make_spec

MAP = StateMap((1, 2), torch.nn.Linear(8, 3))
PLENTY = 10**9


def put(maps, name, num_bytes, *, client="a", share=1.0, in_use=()):
    maps.reserve(name, num_bytes, client=client, max_share=share, in_use=in_use, free_bytes=PLENTY)
    maps.store(name, MAP)


def test_the_least_recently_used_is_given_up():
    maps = StateMaps({"own": MAP}, 100)
    for name in ("first", "second", "third"):
        put(maps, name, 30)
    assert maps.find("first") is MAP
    put(maps, "fourth", 40)
    assert [maps.find(name) for name in ("own", "first", "second", "third", "fourth")] == [MAP, MAP, None, MAP, MAP]
    assert maps.num_bytes == 100
    put(maps, "fifth", 90, in_use={"own"})
    assert maps.num_bytes == 90
    assert maps.wants("first")
    assert not maps.wants("own")
    assert not maps.wants("")
    assert not StateMaps({}, 0).wants("first")


def test_what_open_sessions_use_stays():
    maps = StateMaps({}, 100)
    put(maps, "used", 60)
    put(maps, "free", 20)
    with pytest.raises(Overloaded, match=r"has 50 bytes, and 100 are for them all \(max_state_map_bytes\)"):
        put(maps, "large", 50, in_use={"used"})
    assert maps.find("free") is MAP, "nothing is given up in vain"
    maps.reserve("coming", 40, client="a", max_share=1.0, in_use={"used"}, free_bytes=PLENTY)
    assert (maps.find("free"), maps.find("coming"), maps.wants("coming")) == (None, None, False)
    with pytest.raises(Overloaded):
        put(maps, "one", 1, in_use={"used"})
    maps.give_up("coming")
    assert maps.wants("coming")


def test_a_client_holds_its_share():
    maps = StateMaps({}, 100)
    put(maps, "b", 50, client="b")
    put(maps, "a", 20, share=0.3)
    with pytest.raises(Overloaded, match=r"has 40 bytes, and its client may hold 30 \(max_client_kv_share of"):
        put(maps, "more", 40, share=0.3)
    put(maps, "more", 25, share=0.3)
    assert (maps.find("a"), maps.find("b"), maps.find("more")) == (None, MAP, MAP)


def test_a_machine_without_memory_refuses():
    maps = StateMaps({}, 100)
    with pytest.raises(Overloaded, match="needs 60 bytes, and 59 are free on this machine: lower"):
        maps.reserve("a", 60, client="", max_share=1.0, in_use=(), free_bytes=59)
    with pytest.raises(InvalidRequest, match="num_bytes is 0"):
        maps.reserve("a", 0, client="", max_share=1.0, in_use=(), free_bytes=59)
    assert maps.num_bytes == 0
    assert 0 < memory.free_bytes(torch.device("cpu")) < memory.machine_bytes()


async def parts_of(data, fingerprint, num_bytes=None):
    yield StateMapPart(
        fingerprint=fingerprint, num_bytes=len(data) if num_bytes is None else num_bytes, data=data[:999]
    )
    for start in range(999, len(data), 999):
        yield StateMapPart(data=data[start : start + 999])


async def slowly(parts):
    async for part in parts:
        await asyncio.sleep(0)
        yield part


async def never():
    await asyncio.Event().wait()
    yield StateMapPart()


async def test_what_comes_is_checked(start_core, monkeypatch):
    states = eagle3(target_hidden=32, states=(0, 1, 2), fc_norm=True, vocab=VOCAB, draft_vocab=41).state_map
    data, name = pack_state_map(states), states.fingerprint()
    other = eagle3(target_hidden=24, states=(0, 1, 2), vocab=VOCAB, draft_vocab=41).state_map
    deep = eagle3(target_hidden=32, states=(0, 1, 9), vocab=VOCAB, draft_vocab=41).state_map

    async def wanted(core):
        options = {"hidden_state_layers": (0, 1, 2), "hidden_state_map": name}
        session = await core.open(make_spec(make_prompt(1), **options))
        width = session.first.hidden_states[0].num_features
        await session.close()
        return session.opened.wants_state_map, width

    async with start_core() as core:
        assert await wanted(core) == (True, 96)
        for parts, text in (
            (parts_of(data[:-1], name), "is damaged"),
            (parts_of(b"\xff" * 2000, name), "is damaged"),
            (parts_of(data.replace(b"eps", b"spe"), name), "is damaged"),
            (parts_of(data, "0" * 64), "has another fingerprint than 000000000000…"),
            (parts_of(data, name, len(data) - 1), "the parts have"),
            (parts_of(data, name, len(data) + 1), "the parts have"),
            (parts_of(pack_state_map(other), other.fingerprint()), "reads 72 numbers, and the states of its .* 96"),
            (parts_of(pack_state_map(deep), deep.fingerprint()), "names 9; the target has"),
            (parts_of(b"", name, 0), "num_bytes is 0"),
        ):
            with pytest.raises(InvalidRequest, match=text):
                await core.put_state_map(parts)
        with pytest.raises(Overloaded, match="has 1099511627776 bytes"):
            await core.put_state_map(parts_of(data, name, 2**40))
        with monkeypatch.context() as patch:
            patch.setattr(state_map_intake, "MAP_TIMEOUT_S", 0.0)
            for parts in (slowly(parts_of(data, name)), never()):
                with pytest.raises(DeadlineExceeded, match="did not come within 0 s"):
                    await asyncio.wait_for(core.put_state_map(parts), 5)
        assert await wanted(core) == (True, 96)
        await core.put_state_map(parts_of(data, name))
        await core.put_state_map(parts_of(b"", name, 0))  # it is here
        assert await wanted(core) == (False, 32)

"""Caches kept between the sessions of one id."""

from tests.target_service.conftest import VOCAB, decode, make_prompt, make_spec
from tests.until import until


async def test_a_parked_session_is_reused_by_its_common_prefix(start_core, plain):
    prompt = make_prompt(19, 40)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 20, session_id="chat", park=True))
        assert session.opened.num_cached_tokens == 0
        text = await decode(session)
        await session.close()
        assert (await core.load()).parked_sessions == 1
        follow = (*prompt, *text, *make_prompt(20, 9))
        session = await core.open(make_spec(follow, 15, session_id="chat", park=True))
        assert session.opened.num_cached_tokens == len(prompt) + 19  # the last token was never fed
        assert (await core.load()).parked_sessions == 0
        assert await decode(session) == plain(follow, 15)
        await session.close()
        other = (*prompt[:25], (prompt[25] + 1) % VOCAB, *make_prompt(21, 9))
        session = await core.open(make_spec(other, 15, session_id="chat", park=True))
        assert session.opened.num_cached_tokens == 25
        assert await decode(session) == plain(other, 15)
        await session.close()


async def test_the_same_prompt_again_is_fed_from_its_last_token(start_core, plain):
    prompt = make_prompt(22, 30)
    async with start_core() as core:
        for cached in (0, 29):
            session = await core.open(make_spec(prompt, 8, session_id="chat", park=True))
            assert session.opened.num_cached_tokens == cached
            assert await decode(session) == plain(prompt, 8)
            await session.close()


async def test_an_id_that_is_open_opens_fresh(start_core, plain):
    prompt = make_prompt(23)
    async with start_core() as core:
        one = await core.open(make_spec(prompt, 8, session_id="chat", park=True))
        two = await core.open(make_spec(prompt, 8, session_id="chat", park=True))
        assert two.opened.num_cached_tokens == 0
        assert await decode(one) == await decode(two) == plain(prompt, 8)
        await one.close()
        await two.close()
        assert (await core.load()).parked_sessions == 1


async def test_prompt_logprobs_need_the_whole_prompt(start_core):
    prompt = make_prompt(24, 20)
    async with start_core() as core:
        for _ in range(2):
            session = await core.open(make_spec(prompt, 4, session_id="chat", park=True, prompt_logprobs=0))
            assert session.opened.num_cached_tokens == 0
            assert len(session.opened.prompt_logprobs) == 19
            await session.close()


async def test_parked_sessions_yield_to_open_ones_and_to_time(start_core):
    async with start_core(kv_blocks=16, park_ttl_s=0.2) as core:
        for name in "abc":
            session = await core.open(make_spec(make_prompt(25, 50), 14, session_id=name, park=True))
            await session.close()
        assert (await core.load()).parked_sessions == 3
        big = await core.open(make_spec(make_prompt(26, 100), 100))
        assert (await core.load()).parked_sessions < 3
        await big.close()
        await until(lambda: core.engine.pool.num_parked == 0, 2)

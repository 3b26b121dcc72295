"""Limits of drafting ahead: memory, what was allowed, what is committed, and the load."""

from tests.draft_service.ahead.ahead_client import PROMPT, Client, look_at_all, rest
from tests.draft_service.proposing import propose


async def test_without_memory_for_branches_there_are_fewer_guesses_and_no_errors(start_core, spec, greedy, monkeypatch):
    look_at_all(monkeypatch)
    async with start_core(k=3, model={"kv_cache_memory_bytes": 1 << 18}) as core:
        total = (await core.load()).total_blocks
        prompt = [*PROMPT, *[7] * (32 * (total - 1))]
        client = Client(await core.open(spec(prompt)), prompt)
        assert (await core.load()).used_blocks == total
        for token in range(10):
            proposal, _ = await client.advance([token], 3, 8)
            assert proposal.token_ids == greedy(client.known, 3)
            await rest(core)
            client.collect()
            for ahead in client.kept:  # what continues the session's own line needs no block
                assert ahead.token_ids == greedy([*client.known, *ahead.assumed_token_ids], 3)
            assert client.kept
        await client.session.close()


async def test_branches_make_room_for_a_new_session(start_core, spec, greedy, monkeypatch):
    look_at_all(monkeypatch)
    async with start_core(k=3, model={"kv_cache_memory_bytes": 1 << 18}) as core:
        total = (await core.load()).total_blocks
        client = Client(await core.open(spec(PROMPT, max_tokens=90)), PROMPT)
        own = (await core.load()).used_blocks
        await client.advance([1], 3, 8)
        await rest(core)
        assert (await core.load()).used_blocks > own
        other = await core.open(spec([*PROMPT, *[7] * (32 * (total - own) - 6)], session_id="other"))
        assert (await core.load()).used_blocks == total
        client.collect()
        likeliest = max(client.kept, key=lambda p: (p.base_len == 7, p.likelihood))
        proposal, was_sent = await client.advance(list(likeliest.assumed_token_ids), 3, 8)
        assert was_sent
        assert proposal.token_ids == greedy(client.known, 3)
        await rest(core)
        client.collect()
        for ahead in client.kept:  # the branch is gone, its tokens are fed again
            prefix = [*client.known[: ahead.base_len], *ahead.assumed_token_ids]
            assert ahead.token_ids == greedy(prefix, 3)
        await client.session.close()
        await other.close()


async def test_one_who_never_advances_gets_no_more_than_was_allowed(start_core, spec, monkeypatch):
    look_at_all(monkeypatch)
    async with start_core(k=3) as core:
        for num_ahead_proposals in (1, 3, 7):
            client = Client(await core.open(spec(PROMPT, session_id=str(num_ahead_proposals))), PROMPT)
            await client.advance([1], 3, num_ahead_proposals)
            await rest(core)
            client.collect()
            assert len(client.kept) == num_ahead_proposals
            assert len({p.assumed_token_ids for p in client.kept}) == num_ahead_proposals
            assert all(0 < p.likelihood <= 1 for p in client.kept)
            await client.session.close()


async def test_without_leave_nothing_is_drafted_ahead(start_core, spec, gate):
    async with start_core(k=3) as core:
        session = await core.open(spec(PROMPT))
        for i in range(5):
            await propose(session, 6 + i, [i], 3)
        await rest(core)
        assert (session.received_more(), gate.held, gate.num_guesses) == ([], [], {0})
        assert core.ahead.counts.num_proposals == 0
        await session.close()


async def test_tokens_taken_back_take_the_guesses_with_them(start_core, spec, greedy, monkeypatch):
    look_at_all(monkeypatch)
    async with start_core(k=3) as core:
        session = await core.open(spec(PROMPT))
        await session.advance(6, [1, 2, 3], 3, 6)
        await rest(core)
        await session.advance(6, [9], 3, 6)
        received = [await session.receive()]
        assert (received[0].base_len, received[0].token_ids) == (7, greedy([*PROMPT, 9], 3))
        await rest(core)
        received += session.received_more()
        assert len(received) == 7
        assert all(proposal.base_len == 7 for proposal in received)
        await session.close()


async def test_later_sessions_find_committed_entries_only(start_core, spec, greedy, monkeypatch):
    look_at_all(monkeypatch)
    async with start_core(k=3) as core:
        client = Client(await core.open(spec(PROMPT)), PROMPT)
        await client.advance([1, 2, 3], 3, 8)
        await rest(core)
        await client.session.close()
        load = await core.load()
        assert (load.used_blocks, load.cached_blocks) == (0, 1)
        text = [*client.known, *greedy(client.known, 2), 5]
        session = await core.open(spec(text))
        assert session.opened.num_cached_tokens == 9
        assert (await propose(session, len(text), [], 3)).token_ids == greedy(text, 3)
        await session.close()


async def test_limits_are_those_of_a_fresh_proposal(start_core, spec, greedy, monkeypatch):
    """Near the end of the output and of the context: as many tokens as would be drafted once the verdict is there."""
    look_at_all(monkeypatch)
    for options in ({"max_tokens": 9}, {"max_tokens": 500, "context": 20}):
        context = options.pop("context", 64)
        async with start_core(k=3, model={"max_model_len": context}) as core:
            client = Client(await core.open(spec(PROMPT, **options)), PROMPT)
            end = min(len(PROMPT) + options["max_tokens"], context + 2)
            while len(client.known) < end - 1:
                await client.advance([len(client.known) % 7], 3, 8)
                await rest(core)
                client.collect()
                for ahead in client.kept:
                    prefix = [*client.known[: ahead.base_len], *ahead.assumed_token_ids]
                    assert len(ahead.token_ids) == min(3, end - len(prefix) - 1)
                    assert ahead.token_ids == greedy(prefix, len(ahead.token_ids))
            assert client.kept == []
            await client.session.close()


async def test_a_busy_service_drafts_nothing_ahead(start_core, spec, monkeypatch):
    async with start_core(k=3) as core:
        monkeypatch.setattr("draft_service.ahead.scheduler.BusyShare.share", lambda share: 1.0)
        client = Client(await core.open(spec(PROMPT)), PROMPT)
        for token in range(5):
            await client.advance([token], 3, 8)
            await rest(core)
        client.collect()
        assert client.kept == []
        monkeypatch.setattr("draft_service.ahead.scheduler.BusyShare.share", lambda share: 0.0)
        await client.advance([1], 3, 8)
        await rest(core)
        client.collect()
        assert client.kept
        await client.session.close()

"""Engines that decode their sequences in steps, against a draft service over real connections."""

import asyncio
import logging
import random
import re
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import numpy as np
import pytest

from draft_service import engine_stream
from draft_service.servicer import DraftServicer
from specdec.errors import InvalidRequest
from specdec.rpc.server import RpcServer
from specdec.settings import DraftSettings, ServerSettings, SpeculativeSettings
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from tandem.certificates import write_certificates
from tandem_integrations import sessions, step_client
from tandem_integrations.sessions import BatchRow, RemoteSessions, RowDraft
from tandem_integrations.settings import RemoteDraftSettings
from tandem_integrations.vllm import RemoteProposer
from tests.draft_service.conftest import VOCAB, build_draft, make_model_settings, running, save_parallel
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import params, reference
from tests.llamas import greedy_text
from tests.until import until

MAX_LEN = 4096
PEM_FILES = {"certfile": "cert.pem", "keyfile": "key.pem", "ca_certs": "ca.pem"}


class Service:
    def __init__(self, draft, port=0, **settings):
        self.draft = draft
        self.server = RpcServer(ServerSettings(port=port, **settings))
        self.server.add(add_DraftServiceServicer_to_server, DraftServicer(draft), "draft")

    async def __aenter__(self):
        await self.server.start()
        await self.server.set_serving(True)
        return self

    async def __aexit__(self, *_):
        await self.server.stop()
        assert not self.draft.open_sessions
        assert self.draft.num_opened == self.draft.num_closed


class Engine:
    """Decodes greedily; a step commits what is right of each draft, and one token."""

    def __init__(self, draft, prompts, num_tokens, write=None):
        """``write``: of a prompt and a length, what the engine's model continues it with."""
        write = write or (lambda prompt, count: reference(prompt, params(temperature=0.0, max_tokens=count)))
        self.draft = draft
        self.texts = [[*prompt] for prompt in prompts]
        self.right = [[*prompt, *write(prompt, num_tokens)] for prompt in prompts]
        self.drafts = [[] for _ in prompts]
        self.num_steps = self.num_accepted = 0

    @property
    def unfinished(self):
        return [i for i, text in enumerate(self.texts) if len(text) < len(self.right[i])]

    def step(self, batch=None):
        rows = []
        for i in self.unfinished if batch is None else batch:
            text, right = self.texts[i], self.right[i]
            num_new = 1
            for token in self.drafts[i]:
                if len(text) + num_new >= len(right) or right[len(text) + num_new - 1] != token:
                    break
                num_new += 1
            text += right[len(text) : len(text) + num_new]
            self.num_accepted += num_new - 1
            self.drafts[i] = []
            rows.append((i, BatchRow(np.array(text, np.int32), num_new)))
        drafts = self.draft([row for _, row in rows])
        for (i, _), draft in zip(rows, drafts, strict=True):
            self.drafts[i] = draft
        self.num_steps += 1


def remote(service, **options):
    settings = RemoteDraftSettings.read({"draft": service.server.address, "timeout_ms": 5000} | options)
    return RemoteSessions(settings, 4, MAX_LEN)


async def until_accepted(engine, num_tokens):
    """Step until so many more drafted tokens are accepted."""
    before = engine.num_accepted
    async with asyncio.timeout(30):
        while engine.num_accepted < before + num_tokens:
            assert engine.unfinished
            await asyncio.to_thread(engine.step)
            await asyncio.sleep(0.01)  # the time of a step


def chains(drafting):
    return lambda rows: [draft.chain() for draft in drafting.draft(rows)]


PROMPTS = [(5, 6, 7), (8, 9), (5, 6, 7), tuple(range(3, 60))]


async def test_a_good_draft_is_accepted():
    async with Service(FakeDraft(quality=1.0)) as service:
        drafting = remote(service)
        engine = Engine(chains(drafting), PROMPTS, 60)
        try:
            while engine.unfinished:
                await asyncio.to_thread(engine.step)
        finally:
            drafting.close()
        assert engine.texts == engine.right
        assert engine.num_accepted > 0.7 * 60 * len(PROMPTS)
        assert service.draft.num_opened == len(PROMPTS)


async def test_rows_move_pause_and_end(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_ABSENT_STEPS", 8)
    choose = random.Random(1)
    async with Service(FakeDraft(quality=0.7)) as service:
        drafting = remote(service, reserve_tokens=20)
        engine = Engine(chains(drafting), [(3 + i, 4, 5) for i in range(12)], 80)
        try:
            while engine.unfinished:
                batch = engine.unfinished
                choose.shuffle(batch)
                await asyncio.to_thread(engine.step, batch[: choose.randrange(len(batch) + 1)])
                await until(lambda: len(service.draft.open_sessions) <= 12)
            for _ in range(2 * sessions.MAX_ABSENT_STEPS):
                await asyncio.to_thread(engine.step)
            await until(lambda: not service.draft.open_sessions)
        finally:
            drafting.close()
        assert engine.texts == engine.right
        assert engine.num_accepted > 200
        # Each sequence outgrows what is reserved for it several times.
        assert service.draft.num_opened > 2 * 12


async def test_a_draft_that_is_too_late_costs_no_more_than_its_time():
    async with Service(FakeDraft(latency_s=1.0, open_latency_s=0.0)) as service:
        drafting = remote(service, timeout_ms=20)
        engine = Engine(chains(drafting), PROMPTS[:1], 12)
        try:
            start = asyncio.get_running_loop().time()
            while engine.unfinished:
                await asyncio.to_thread(engine.step)
            assert asyncio.get_running_loop().time() - start < 12 * 0.5
        finally:
            drafting.close()
        assert engine.texts == engine.right


async def test_a_draft_that_never_answers_counts_as_lost(monkeypatch, caplog):
    """It costs a few steps their time, not every one, and is found again when it answers."""
    monkeypatch.setattr(step_client, "RETRY_S", 0.3)
    draft = FakeDraft()
    async with Service(draft) as service:
        drafting = remote(service, timeout_ms=50)
        engine = Engine(chains(drafting), PROMPTS[:1], 400)
        await until_accepted(engine, 1)
        draft.frozen.clear()
        start = asyncio.get_running_loop().time()
        for _ in range(100):
            await asyncio.to_thread(engine.step)
        # If each waited, they would take 5 s.
        assert asyncio.get_running_loop().time() - start < 100 * 0.05 / 2
        draft.frozen.set()
        await until_accepted(engine, 10)
        drafting.close()
    assert "had nothing within 50 ms" in caplog.text


async def test_the_pauses_of_a_draft_that_is_always_late_grow(monkeypatch, caplog):
    monkeypatch.setattr(step_client, "RETRY_S", 0.05)
    monkeypatch.setattr(step_client, "MAX_RETRY_S", 0.3)
    async with Service(FakeDraft(latency_s=30.0, open_latency_s=0.0)) as service:
        drafting = remote(service, timeout_ms=5)
        engine = Engine(chains(drafting), PROMPTS[:1], 4000)

        async def is_late():
            await asyncio.to_thread(engine.step)
            return caplog.text.count("it is asked again") >= 5

        await until(is_late)
        drafting.close()
    pauses = re.findall(r"asked again in (\S+) s", caplog.text)
    assert pauses[:5] == ["0.05", "0.1", "0.2", "0.3", "0.3"]


def test_a_service_that_is_not_there_costs_no_step_its_time(caplog):
    drafting = RemoteSessions(RemoteDraftSettings(draft="127.0.0.1:1", timeout_ms=200), 4, MAX_LEN)
    begun = time.monotonic()
    for _ in range(100):
        assert drafting.draft([BatchRow(np.array([1, 2], np.int32), 1)]) == [RowDraft()]
    assert time.monotonic() - begun < 2 * 0.2, "the first step alone waits"
    assert caplog.text.count("127.0.0.1:1 is not there yet") == 1
    drafting.close()


def test_a_service_that_refuses_the_stream_says_why_once(caplog):
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    drafting = RemoteSessions(RemoteDraftSettings(draft=address, timeout_ms=200), 4, MAX_LEN)
    ends = time.monotonic() + 3 * step_client.CALL_S
    while time.monotonic() < ends:
        assert drafting.draft([BatchRow(np.array([1, 2], np.int32), 1)]) == [RowDraft()]
        time.sleep(0.01)
    drafting.close()
    server.stop(None)
    assert caplog.text.count("does not draft: Method not found!") == 1


async def test_over_tls(tmp_path):
    write_certificates(tmp_path)
    files = {
        name: {f"ssl_{key}": str(tmp_path / name / file) for key, file in PEM_FILES.items()}
        for name in ("draft", "gateway")
    }
    async with Service(FakeDraft(quality=1.0), **files["draft"]) as service:
        drafting, refused = remote(service, **files["gateway"]), remote(service, timeout_ms=200)
        try:
            for each in (refused, drafting):
                engine = Engine(chains(each), PROMPTS, 30)
                while engine.unfinished:
                    await asyncio.to_thread(engine.step)
                assert bool(engine.num_accepted) == (each is drafting)
        finally:
            drafting.close()
            refused.close()


def test_no_connection_before_a_sequence_has_tokens():
    drafting = RemoteSessions(RemoteDraftSettings(draft="127.0.0.1:1"), 4, MAX_LEN)
    before = {thread.name for thread in threading.enumerate()}
    assert drafting.draft([BatchRow(np.array([1, 2], np.int32), 0)]) == [RowDraft()]
    assert drafting.draft([]) == []
    assert {thread.name for thread in threading.enumerate()} == before


async def test_a_lost_service_is_found_within_two_seconds_of_its_return(caplog):
    caplog.set_level(logging.INFO)
    draft = FakeDraft()
    async with Service(draft) as service:
        port = service.server.port
        drafting = remote(service, timeout_ms=500)
        engine = Engine(chains(drafting), PROMPTS, 4000)
        await until_accepted(engine, 1)
    clock = asyncio.get_running_loop().time
    ends = clock() + 4.0  # two attempts fail at least, and the pauses between them have grown
    for _ in range(3):
        await asyncio.to_thread(engine.step)
    before = engine.num_accepted
    while clock() < ends:
        await asyncio.to_thread(engine.step)
        await asyncio.sleep(0.05)
    assert engine.num_accepted == before
    async with Service(draft, port):
        came_back = clock()
        await until_accepted(engine, 1)
        assert clock() - came_back < 2.0
        drafting.close()
    assert all(text == right[: len(text)] for text, right in zip(engine.texts, engine.right, strict=True))
    assert "was lost" in caplog.text
    assert caplog.text.count("is connected") == 2


async def test_a_service_that_stops_ends_the_streams_of_engines_at_once(caplog):
    draft = FakeDraft()
    async with Service(draft) as service:
        drafting = remote(service, timeout_ms=500)
        await until_accepted(Engine(chains(drafting), PROMPTS, 4000), 1)
        assert len(draft.on_drain) == 1
        for end in draft.on_drain:
            end()
        async with asyncio.timeout(20):
            assert await service.server.drain()
        assert not draft.on_drain
        async with asyncio.timeout(20):
            while "is shutting down" not in caplog.text:  # noqa: ASYNC110 (a thread writes it)
                await asyncio.sleep(0.01)
        drafting.close()


async def test_sessions_that_are_refused_are_tried_again_later(monkeypatch, caplog):
    monkeypatch.setattr(sessions, "RETRY_STEPS", 10)
    draft = FakeDraft()
    async with Service(draft) as service:
        drafting = remote(service, timeout_ms=500)
        engine = Engine(chains(drafting), PROMPTS[:1], 200)
        draft.dead = True
        for _ in range(5):
            await asyncio.to_thread(engine.step)
        assert not engine.num_accepted
        draft.dead = False
        for _ in range(10):
            await asyncio.to_thread(engine.step)
        assert engine.num_accepted
        drafting.close()
    assert "the fake is dead" in caplog.text


async def test_sessions_that_idled_are_opened_again_at_once(monkeypatch):
    monkeypatch.setattr(sessions, "RETRY_STEPS", 1_000_000)
    draft = FakeDraft()
    async with Service(draft) as service:
        drafting = remote(service)
        engine = Engine(chains(drafting), PROMPTS, 400)

        async def accept():
            before = engine.num_accepted
            while engine.num_accepted < before + 10:
                assert engine.unfinished
                await asyncio.to_thread(engine.step)

        async with asyncio.timeout(30):
            await accept()
            monkeypatch.setattr(engine_stream, "MAX_IDLE_S", 0.05)
            await asyncio.to_thread(engine.step)
            await until(lambda: not draft.open_sessions)
            monkeypatch.setattr(engine_stream, "MAX_IDLE_S", 60.0)
            await accept()
        assert draft.num_opened == 2 * len(PROMPTS)
        drafting.close()


def vllm_config(address, vocab_size):
    return types.SimpleNamespace(
        additional_config={"tandem": {"draft": address, "timeout_ms": 5000}},
        speculative_config=types.SimpleNamespace(num_speculative_tokens=4),
        model_config=types.SimpleNamespace(max_model_len=MAX_LEN, get_vocab_size=lambda: vocab_size),
    )


async def decoded_by_vllm(address, vocab_size, write=None):
    """Three texts that an engine decodes, which calls the proposer as vLLM does."""
    proposer = RemoteProposer(vllm_config(address, vocab_size), is_output_rank=lambda: True)
    buffer = np.zeros((4, MAX_LEN), np.int32)

    def draft_rows(rows):
        assert len(rows) <= 3
        for index, row in enumerate(rows):
            buffer[index, : len(row.token_ids)] = row.token_ids
        new = [row.token_ids[len(row.token_ids) - row.num_new :].tolist() for row in rows]
        lengths = np.array([len(row.token_ids) for row in rows], np.int32)
        # A sequence whose prompt is being computed takes part without tokens.
        answer = proposer.propose([*new, []], np.append(lengths, np.int32(5)), buffer, slot_mappings=None)
        assert answer.pop() == []
        return answer

    engine = Engine(draft_rows, PROMPTS[:3], 60, write)
    while engine.unfinished:
        await asyncio.to_thread(engine.step)
    assert engine.texts == engine.right
    proposer.close()
    return engine


async def test_as_vllm_calls_it():
    async with Service(FakeDraft(quality=1.0)) as service:
        engine = await decoded_by_vllm(service.server.address, 64)
        assert engine.num_accepted > 120
        other = RemoteProposer(vllm_config(service.server.address, 64), is_output_rank=lambda: False)
        assert other.propose([[1], []], None, None) == [[], []]


async def test_a_draft_that_drafts_in_parallel_behind_vllm(tmp_path):
    """The target's own weights: the first token of each proposal is right, those after it are guessed from masks. Of
    other weights next to nothing is.
    """
    write, num_accepted = partial(greedy_text, build_draft()), []
    for seed in (0, 1):
        folder = save_parallel(build_draft(seed=seed), tmp_path / str(seed))
        speculative = SpeculativeSettings(model=folder, method="draft_model", num_speculative_tokens=4)
        settings = DraftSettings(speculative=speculative, model=make_model_settings(folder))
        server = RpcServer(ServerSettings(port=0))
        async with running(settings) as core:
            server.add(add_DraftServiceServicer_to_server, DraftServicer(core), "draft")
            await server.start()
            await server.set_serving(True)
            try:
                num_accepted.append((await decoded_by_vllm(server.address, VOCAB, write)).num_accepted)
            finally:
                await server.stop()
    assert num_accepted[0] > 80
    assert num_accepted[1] < 40


def test_options(monkeypatch):
    monkeypatch.setenv("TANDEM_DRAFT", "a:1")
    monkeypatch.setenv("TANDEM_TIMEOUT_MS", "7")
    assert RemoteDraftSettings.read({"timeout_ms": 9}) == RemoteDraftSettings(draft="a:1", timeout_ms=9)
    with pytest.raises(InvalidRequest, match="no option speed; it has draft"):
        RemoteDraftSettings.read({"speed": 1})
    with pytest.raises(InvalidRequest, match=r"timeout_ms is 0; it must be in \[1"):
        RemoteDraftSettings.read({"timeout_ms": 0})
    with pytest.raises(InvalidRequest, match="timeout_ms is '9'; it must be a whole number"):
        RemoteDraftSettings.read({"timeout_ms": "9"})
    with pytest.raises(
        InvalidRequest, match="reserve_tokens is 4; it must be above num_speculative_tokens, which is 4"
    ):
        RemoteSessions(RemoteDraftSettings(reserve_tokens=4), 4, MAX_LEN)
    monkeypatch.setenv("TANDEM_TIMEOUT_MS", "soon")
    with pytest.raises(InvalidRequest, match="TANDEM_TIMEOUT_MS is 'soon'; it must be a whole number"):
        RemoteDraftSettings.read({})

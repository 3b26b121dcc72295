"""Drafts that clients bring, honest and hostile: the text is that of plain decoding, and nothing stays of them."""

import asyncio
import secrets
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from statistics import median

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2
from tandem.certificates import write_certificates
from tests.e2e.servers import (
    DRAFT_MODEL,
    TARGET_MODEL,
    ServerProcess,
    Stack,
    collect,
    ids_of,
    is_free,
    request_of,
    target_process,
    wait_until,
)
from tests.until import until

pytestmark = pytest.mark.e2e

K = 4
#: Greedy and seeded.
PARAMS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 77})
LONG = 300
KEYS = ("sk-alice", "sk-bob")


@pytest.fixture(scope="module")
def stack():
    """A target over TCP, and a gateway without a draft."""
    running = Stack.start([target_process("--port", "0")])
    yield running
    assert is_free(running)
    running.close()


@pytest.fixture(scope="module")
def keyed(stack):
    """The same target behind a gateway that asks for keys."""
    running = Stack.start(stack.targets, [], "--api-key", KEYS[0], "--api-key", KEYS[1])
    yield running
    running.close()


def new_token():
    return secrets.token_urlsafe(32)


def attach_process(stack, token, *arguments):
    return ServerProcess(
        "tandem", "attach", "--server", stack.grpc_address, f"--token={token}", "--num-threads", "1", *arguments
    )


def attached(request, token):
    result = pb.GenerateRequest(speculation=pb.SpeculationOptions(attachment=token))
    result.MergeFrom(request)
    return result


def target_model(stack):
    with grpc.insecure_channel(stack.grpc_address) as channel:
        return stack.generation(channel).ListModels(pb.ListModelsRequest()).models[0].target


def description(stack, **changes):
    """What an honest draft says of itself."""
    target = target_model(stack)
    info = types_pb2.ModelInfo(name="draft", method="draft_model", num_speculative_tokens=K)
    for name in ("vocab_size", "tokenizer_size", "tokenizer_fingerprint"):
        setattr(info, name, getattr(target, name))
    info.MergeFrom(types_pb2.ModelInfo(**changes))
    return info


@pytest.fixture(scope="module")
def laptop(stack):
    """``tandem attach`` with the bundled draft, and its token."""
    token = new_token()
    process = attach_process(stack, token, "--draft", DRAFT_MODEL).start()
    assert process.ready["x-draft-attachment"] == token
    yield process, token
    process.stop()


# --- an honest draft ---


@pytest.mark.parametrize("params", [pytest.param(PARAMS[0], marks=pytest.mark.exhaustive), *PARAMS[1:]])
def test_it_drafts_for_requests_that_name_it(stack, laptop, prompts, params):
    _, token = laptop
    num_accepted = 0
    for prompt in prompts[:3]:
        request = request_of(prompt, max_tokens=LONG, **params)
        plain, drafted = collect(stack, request), collect(stack, attached(request, token))
        assert ids_of(drafted) == ids_of(plain)
        assert plain[-1].speculation.no_speculation_reason == "no_draft"
        assert drafted[-1].speculation.num_direct_rounds > 0
        assert drafted[-1].speculation.draft_wait_ns == 0  # nobody waits for it
        num_accepted += drafted[-1].speculation.num_accepted_draft_tokens
    assert num_accepted > 50


def test_rest_names_it_by_a_header(stack, laptop, prompts):
    body = {"prompt": prompts[0], "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    texts = []
    for headers in ({}, {"X-Draft-Attachment": laptop[1]}):
        answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, headers=headers, timeout=60).json()
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_whoever_names_one_has_a_text_that_no_draft_changes(stack, laptop, prompts):
    """Under a ratio rule a lying q chooses the text: ``coupled`` takes its place, whether or not the draft is there."""
    request = request_of(prompts[0], max_tokens=60, temperature=1.0, seed=3)
    coupled = ids_of(collect(stack, request))
    request.speculation.verification = types_pb2.VERIFICATION_RULE_BLOCK
    assert ids_of(collect(stack, attached(request, laptop[1]))) == coupled
    assert ids_of(collect(stack, attached(request, new_token()))) == coupled


def test_a_method_and_an_attachment_contradict_each_other(stack, laptop):
    request = attached(request_of("def", max_tokens=4), laptop[1])
    request.speculation.method = "ngram"
    with pytest.raises(grpc.RpcError, match="method and attachment") as caught:
        collect(stack, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_it_is_killed_and_comes_back(stack, prompts):
    """In the middle of a request, which goes on without it, and is drafted for again."""
    token = new_token()
    process = attach_process(stack, token, "--draft", DRAFT_MODEL).start()
    request = request_of(prompts[0], max_tokens=900)
    plain = ids_of(collect(stack, request))

    def kill():
        process.kill()
        process.start()

    pieces = collect(stack, attached(request, token), acts={100: kill})
    assert ids_of(pieces) == plain
    assert pieces[-1].speculation.num_draft_failures >= 1
    pieces = collect(stack, attached(request, token))
    assert ids_of(pieces) == plain
    assert pieces[-1].speculation.num_accepted_draft_tokens > 0
    process.stop()


def test_it_dials_again_after_the_gateway_was_lost(stack, prompts):
    gateway = Stack.start(stack.targets)
    token = new_token()
    process = attach_process(gateway, token, "--draft", DRAFT_MODEL).start()
    gateway.gateway.kill()
    wait_until(lambda: any("not attached to" in line for line in process.log), "the log line")
    gateway.gateway.restart_on_same_port()
    request = attached(request_of(prompts[0], max_tokens=LONG), token)
    wait_until(lambda: collect(gateway, request)[-1].speculation.num_accepted_draft_tokens, "drafted tokens")
    assert sum("INFO" in line and "attached to" in line for line in process.log) == 2
    begun = time.monotonic()
    gateway.close()  # it waits for no attachment
    assert time.monotonic() - begun < 5
    process.stop()


async def test_a_command_that_another_replaces_ends(stack, prompts):
    """In the middle of drafting, and for good: two that take each other's place would do so for ever."""
    token = new_token()
    process = attach_process(stack, token, "--draft", DRAFT_MODEL).start()
    requests = [attached(request_of(prompt, max_tokens=LONG), token) for prompt in prompts[:4]]
    pieces = []
    drafting = [asyncio.create_task(generate(stack, request, pieces=pieces)) for request in requests]
    await until(lambda: len(pieces) > 40)
    async with attachment(stack, silence, token=token) as (_, newer):
        assert await asyncio.to_thread(process.wait, 60) == 1
        assert "another draft with this token has taken the place of this one" in process.log[-1]
        assert not any("trying again" in line for line in process.log)
        assert not newer.ended.done()
        await asyncio.gather(*drafting)


def test_a_file_that_changes_is_predicted(stack, tmp_path):
    """An editor's buffer: later requests are drafted from what it holds then."""
    token, prompt, file = new_token(), "# the numbers from one to sixty, in words\n", tmp_path / "buffer.txt"
    file.write_text("nothing of the kind\n" * 50)
    process = attach_process(stack, token, "--prediction", str(file)).start()
    request = request_of(prompt, max_tokens=200)
    plain = collect(stack, request)
    useless = collect(stack, attached(request, token))
    file.write_text("".join(piece.text for piece in plain))

    def predicted():
        pieces = collect(stack, attached(request, token))
        assert ids_of(pieces) == ids_of(plain)
        return pieces[-1].usage.accepted_prediction_tokens

    wait_until(lambda: predicted() > 100, "the new text")
    assert ids_of(useless) == ids_of(plain)
    assert useless[-1].usage.accepted_prediction_tokens < 100
    process.stop()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "nothing to attach"),
        (("--draft", f"{TARGET_MODEL}-eagle3"), "is for eagle3, which reads states of the target"),
        (("--draft", DRAFT_MODEL, "--token", "short"), "token needs 32 to 128"),
    ],
)
def test_what_is_refused_ends_the_command(stack, arguments, text):
    process = ServerProcess("tandem", "attach", "--server", stack.grpc_address, *arguments)
    process.launch()
    assert process.wait(60) in (1, 2)
    assert text in "".join(process.log)


def test_over_tls_with_a_key(stack, tmp_path):
    write_certificates(tmp_path)
    folder, buffer = tmp_path / "gateway", tmp_path / "buffer"
    buffer.write_text("text")
    files = ("--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem"))
    gateway = Stack.start(stack.targets, [], *files, "--api-key", KEYS[0])
    arguments = ("--prediction", str(buffer), "--ssl-ca-certs", str(folder / "ca.pem"))
    refused = attach_process(gateway, new_token(), *arguments)
    refused.launch()
    assert refused.wait(60) == 1
    assert "no API key was sent" in "".join(refused.log)
    attach_process(gateway, new_token(), *arguments, "--api-key", KEYS[0]).start().stop()
    gateway.close()


@pytest.fixture(scope="module")
def paced(stack):
    """A gateway that chooses draft lengths."""
    ports = ("--port", "0", "--grpc-port", "0")
    gateway = ServerProcess("gateway", "--targets", stack.targets[0].address, "--tokenizer", TARGET_MODEL, *ports)
    yield Stack(stack.targets, [], gateway.start())
    gateway.stop()


# --- hostile ones ---


class Client:
    """A client's own implementation of the call; ``answers`` makes what it sends when it is asked."""

    def __init__(self, call, answers):
        self.call = call
        self.answers = answers
        self.num_asked = 0
        #: The prompts that it was told.
        self.told = []
        #: Why the gateway ends the call.
        self.ended = asyncio.get_running_loop().create_future()
        self.writing = asyncio.Lock()

    async def send(self, session, **response):
        message = draft_pb.RelayedResponse(session=session, response=draft_pb.DraftResponse(**response))
        await self.write(pb.AttachDraftRequest(relayed=message))

    async def write(self, message):
        async with self.writing:
            await self.call.write(message)

    async def run(self):
        lengths = {}
        while (message := await self.call.read()) is not grpc.aio.EOF:
            if message.HasField("ended"):
                self.ended.set_result(message.ended)
            request, session = message.relayed.request, message.relayed.session
            kind = request.WhichOneof("kind")
            if kind == "open":
                lengths[session] = len(request.open.token_ids)
                self.told.append(list(request.open.token_ids))
                opened = {"epoch": request.open.epoch, "num_speculative_tokens": K, "streams": True}
                if (changes := getattr(self.answers, "opened", {})) is not None:
                    await self.send(session, opened=draft_pb.DraftSessionOpened(**opened | changes))
            elif kind == "advance":
                self.num_asked += request.advance.num_draft_tokens > 0
                lengths[session] = request.advance.base_len + len(request.advance.token_ids)
                await self.answers(self, session, request.advance, lengths[session])


@asynccontextmanager
async def attachment(stack, answers, *, token=None, key=None, **changes):
    """A hostile client, attached; it yields the token and the client."""
    token = token or new_token()
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        call = pb_grpc.GenerationServiceStub(channel).AttachDraft(metadata=metadata)
        info = description(stack, **changes) if key is None else await described(stack, channel, metadata)
        await call.write(pb.AttachDraftRequest(attach=pb.Attachment(token=token, draft=info)))
        assert (await call.read()).WhichOneof("kind") == "attached"
        client = Client(call, answers)
        running = asyncio.create_task(client.run())
        try:
            yield token, client
        finally:
            running.cancel()
            call.cancel()
            # The gateway may have ended the call: its rejected tokens are counted over all tests.
            with suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await running


async def described(stack, channel, metadata):
    models = await pb_grpc.GenerationServiceStub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
    target = models.models[0].target
    info = types_pb2.ModelInfo(name="draft", num_speculative_tokens=K, tokenizer_size=target.tokenizer_size)
    info.vocab_size, info.tokenizer_fingerprint = target.vocab_size, target.tokenizer_fingerprint
    return info


async def generate(stack, request, key=None, pieces=None):
    """The pieces of a request, read while the client drafts in this process, and when they came."""
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    pieces, times = [] if pieces is None else pieces, []
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        async for piece in pb_grpc.GenerationServiceStub(channel).Generate(request, timeout=120, metadata=metadata):
            pieces.append(piece)
            times.append(time.perf_counter())
    return pieces, times


def proposal(epoch, length, token_ids, **fields):
    return types_pb2.Proposal(epoch=epoch, base_len=length, token_ids=token_ids, **fields)


async def wrong_tokens(client, session, advance, length):
    number = client.num_asked
    for ahead in range(3):
        tokens = [5 + (number + i) % 50 for i in range(K)]
        await client.send(
            session, proposal=proposal(advance.epoch, length + ahead * K, tokens, chain=number, draft_ns=2**63)
        )


async def unknown_tokens(client, session, advance, length):
    await client.send(session, proposal=proposal(advance.epoch, length, [2**31] * K, chain=1))


async def too_many_tokens(client, session, advance, length):
    await client.send(session, proposal=proposal(advance.epoch, length, [7] * 1000, chain=1))


async def endless_chain(client, session, advance, length):
    for i in range(400):
        await client.send(session, proposal=proposal(advance.epoch, length + i * K, [7] * K, chain=1))


async def wrong_lengths(client, session, advance, length):
    for base_len in (0, length - 1, length + 1, 2**31, length):
        await client.send(session, proposal=proposal(advance.epoch, base_len, [7] * K, chain=base_len % 7))


async def a_tree_with_q(client, session, advance, length):
    q_rows = [types_pb2.SparseRow(packed=b"\x00\x01\x00\xff\xff")] * 2
    tree = proposal(advance.epoch, length, [7, 8], parents=[-1, -1], chain=1, q_rows=q_rows)
    await client.send(session, proposal=tree)


async def nonsense(client, session, advance, length):
    await client.send(session, opened=draft_pb.DraftSessionOpened(epoch=99))
    await client.write(pb.AttachDraftRequest(relayed=draft_pb.RelayedResponse(session=session)))
    await client.send(session + 1000, proposal=proposal(1, length, [7]))


async def an_error(client, session, advance, length):
    error = draft_pb.RelayedResponse(session=session, error="\x1b[2J" + "x" * 10_000)
    await client.write(pb.AttachDraftRequest(relayed=error))


async def silence(client, session, advance, length):
    pass


async def huge_messages(client, session, advance, length):
    with suppress(grpc.RpcError):
        await client.send(session, proposal=proposal(advance.epoch, length, range(100_000), chain=1))


async def a_second_attach(client, session, advance, length):
    await client.write(pb.AttachDraftRequest(attach=pb.Attachment(token=new_token())))


async def a_flood(client, session, advance, length):
    """It never reads again."""
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        while True:
            await client.send(session, proposal=proposal(advance.epoch, length, [7] * K, chain=1))


async def leaves(client, session, advance, length):
    if client.num_asked > 10:
        client.call.cancel()


async def late_tokens(client, session, advance, length):
    await asyncio.sleep(0.3)
    await client.send(session, proposal=proposal(advance.epoch, length, [7] * K, chain=client.num_asked))


def opens_otherwise(name, opened):
    """It opens sessions so, and is asked for nothing then."""

    async def answers(client, session, advance, length):
        raise AssertionError("it is not asked")

    answers.__name__, answers.opened = name, opened
    return answers


endless_chain.opened = {"num_speculative_tokens": 2**31}

ATTACKS = (
    wrong_tokens, unknown_tokens, too_many_tokens, endless_chain, wrong_lengths, a_tree_with_q, nonsense, an_error,
    silence, huge_messages, a_second_attach, a_flood, leaves, late_tokens,
    opens_otherwise("does_not_stream", {"streams": False}), opens_otherwise("another_epoch", {"epoch": 99}),
    opens_otherwise("never_opens", None),
)  # fmt: skip


@pytest.fixture(scope="module")
def attacked(stack, prompts):
    """Requests, and the tokens of plain decoding."""
    requests = [request_of(prompts[i], max_tokens=120, **params) for i, params in enumerate(PARAMS)]
    return requests, [ids_of(collect(stack, request)) for request in requests]


@pytest.mark.parametrize("answers", ATTACKS, ids=lambda answers: answers.__name__)
async def test_no_draft_changes_a_text(stack, attacked, answers):
    requests, plain = attacked
    async with attachment(stack, answers) as (token, client):
        drafted = [await generate(stack, attached(request, token)) for request in requests]
        assert [ids_of(pieces) for pieces, _ in drafted] == plain
        assert len(client.told) >= 1
    assert all(pieces[-1].speculation.num_target_failures == 0 for pieces, _ in drafted)
    wait_until(lambda: is_free(stack), "the end of all sessions")


@pytest.mark.exhaustive  # it counts what times decide, and a machine that does other things as well has others
@pytest.mark.parametrize("answers", [late_tokens, silence, wrong_tokens], ids=lambda answers: answers.__name__)
async def test_one_that_brings_nothing_is_not_asked(paced, prompts, answers):
    """Pacing gives it up. A request is then as fast as a plain one: both in turn."""
    request = request_of(prompts[2], max_tokens=400)

    async def seconds(token):
        begun = time.perf_counter()
        await generate(paced, attached(request, token))
        return time.perf_counter() - begun

    async with attachment(paced, answers) as (token, client):
        for _ in range(6):
            await seconds(token)
        before, ratios = client.num_asked, []
        for _ in range(8):
            plain = await seconds("")
            ratios.append(plain / await seconds(token))
        assert client.num_asked - before < 8 * 400 / 2
        assert median(ratios) > 0.8  # on a machine that does other things as well


@pytest.mark.parametrize(
    "answers", [a_flood, pytest.param(wrong_tokens, marks=pytest.mark.exhaustive)], ids=lambda answers: answers.__name__
)
async def test_others_are_not_held_up(stack, prompts, answers):
    """The longest gap of another stream, with the attack and without it in turn, is not doubled."""
    request = request_of(prompts[1], max_tokens=150)

    async def longest_gap():
        _, times = await generate(stack, request)
        return max(b - a for a, b in pairwise(times))

    async def attack(token):
        while True:
            await generate(stack, attached(request_of(prompts[0], max_tokens=400), token))

    calm, attacked = [], []
    for _ in range(3):
        attacking = asyncio.create_task(attack(""))  # the same load, drafted by nobody
        calm += [await longest_gap() for _ in range(2)]
        assert not attacking.done()
        attacking.cancel()
        async with attachment(stack, answers) as (token, client):
            attacking = asyncio.create_task(attack(token))
            attacked += [await longest_gap() for _ in range(2)]
            assert not attacking.done()
            attacking.cancel()
            assert client.num_asked > 0
    assert median(attacked) < 2 * median(calm) + 0.02


# --- whose it is ---


async def test_another_key_cannot_use_or_see_it(keyed, prompts):
    """With the token of another key's attachment a request is decoded plainly, and that draft hears nothing of it."""
    request = request_of(prompts[0], max_tokens=60)
    plain, _ = await generate(keyed, request, KEYS[0])
    async with attachment(keyed, wrong_tokens, key=KEYS[0]) as (token, client):
        pieces, _ = await generate(keyed, attached(request, token), KEYS[1])
        assert pieces[-1].speculation.no_speculation_reason == "no_draft"
        assert client.told == []
        async with attachment(keyed, wrong_tokens, key=KEYS[1], token=token) as (_, other):
            pieces, _ = await generate(keyed, attached(request, token), KEYS[0])
            assert ids_of(pieces) == ids_of(plain)
            assert (len(client.told) > 0, other.told) == (True, [])
    async with grpc.aio.insecure_channel(keyed.grpc_address) as channel:
        assert await pb_grpc.GenerationServiceStub(channel).AttachDraft().code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_newest_of_two_with_one_token_drafts(keyed, prompts):
    """The older one is told: a laptop that was cut off is not locked out by its own dead call."""
    request = request_of(prompts[0], max_tokens=60)
    async with (
        attachment(keyed, wrong_tokens, key=KEYS[1]) as (token, first),
        attachment(keyed, wrong_tokens, token=token, key=KEYS[1]) as (_, second),
    ):
        assert await first.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        await generate(keyed, attached(request, token), KEYS[1])
        assert (first.told, len(second.told) > 0) == ([], True)
        request = request_of(prompts[0], max_tokens=LONG)
        drafting = asyncio.create_task(generate(keyed, attached(request, token), KEYS[1]))
        await until(lambda: len(second.told) > 1)
        async with attachment(keyed, silence, token=token, key=KEYS[1]):
            ended = await asyncio.wait_for(second.ended, 60)  # while it writes gRPC would tell it INTERNAL
        assert (ended.code, "another draft with this token" in ended.text) == ("FAILED_PRECONDITION", True)
        await drafting


async def test_the_number_of_attachments_is_limited(keyed):
    """By key; one that left counts no more."""

    async def attach_once():
        with suppress(grpc.RpcError):
            async with attachment(keyed, silence, key=KEYS[0]):
                return True
        return False

    await until(attach_once)  # nothing is left of earlier tests
    async with AsyncExitStack() as exits:
        for _ in range(4):
            await until(partial(entered, exits, keyed))
        with pytest.raises(grpc.RpcError, match="max_client_attachments of the key"):
            await exits.enter_async_context(attachment(keyed, silence, key=KEYS[0]))
        async with attachment(keyed, silence, key=KEYS[1]):
            pass
    await until(attach_once)


async def entered(exits, stack):
    with suppress(grpc.RpcError):
        await exits.enter_async_context(attachment(stack, silence, key=KEYS[0]))
        return True
    return False


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokenizer_fingerprint": "0" * 64}, "different tokenizers"),
        ({"vocab_size": 100, "tokenizer_size": 100}, "knows 100 tokens"),
        ({"hidden_state_layers": [-1]}, "hidden states"),
        ({"verification": 77}, "verification is 77"),
    ],
)
async def test_a_draft_of_another_kind_is_refused(stack, changes, text):
    with pytest.raises(grpc.RpcError, match=text):
        async with attachment(stack, silence, **changes):
            pass


async def test_nothing_stays_of_attachments_that_left(stack, prompts):
    """After many that came, drafted and vanished: memory and open files of the gateway."""
    gateway = psutil.Process(stack.gateway.pid)

    async def round_of(count):
        for _ in range(count):
            async with attachment(stack, wrong_tokens) as (token, _):
                await generate(stack, attached(request_of(prompts[0], max_tokens=8), token))
        await asyncio.sleep(0.5)
        return gateway.memory_info().rss, gateway.num_fds()

    await round_of(20)
    rss, num_fds = await round_of(20)
    later_rss, later_fds = await round_of(60)
    assert later_rss < rss + 8 * 2**20
    assert later_fds <= num_fds + 2

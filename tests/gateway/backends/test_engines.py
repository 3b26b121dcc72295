"""Engines as targets: against a scripted server with vLLM's API, and against Tandem's own."""

import asyncio
import logging
import re
import ssl

import grpc.aio
import pytest

from gateway.backends.engines import connection as connections
from gateway.backends.engines import target as targets
from gateway.backends.engines.spec import EngineSpec
from gateway.text.tokenizer import TextTokenizer
from specdec.errors import InvalidRequest, Unavailable
from specdec.rpc.certificates import Certificates
from specdec.settings import GatewaySettings
from specdec.settings.listening import TlsFiles
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from tandem.certificates import write_certificates
from tests.e2e.collector import Collector
from tests.gateway.backends.engine_gateway import ask, events_of, gateway_to, ids_of
from tests.gateway.conftest import serve
from tests.gateway.test_tls import replace_files, ssl_flags
from tests.until import until

pytestmark = pytest.mark.usefixtures("often")


async def test_text_is_made_of_the_engines_token_ids(http, engine, tokenizer, expected):
    answer = (await ask(http)).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == expected(12)
    assert choice["text"] == tokenizer.decode(choice["token_ids"])
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    body = engine.bodies[0]
    assert body["prompt"] == tokenizer.encode("Hello")
    assert "seed" not in body
    assert body["model"] == "engine-model"


async def test_a_stream_has_the_same_text(http, tokenizer, expected):
    answer = await ask(http, stream=True, max_tokens=40)
    pieces = [choice for event in events_of(answer.text) for choice in event["choices"]]
    ids = [token for piece in pieces for token in piece["token_ids"]]
    assert ids == expected(40)
    assert "".join(piece["text"] for piece in pieces) == tokenizer.decode(ids)
    assert len(pieces) > 10


async def test_chat_and_stop_strings_are_the_gateways_own(http, engine, tokenizer):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0, "stop": ["lazy dog"]}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "lazy dog"
    assert "lazy dog" not in choice["message"]["content"]
    assert engine.bodies[0]["prompt"] == tokenizer.encode("<|user|>Hi<|assistant|>", add_special_tokens=False)
    assert "stop" not in engine.bodies[0]
    await until(lambda: engine.num_open == 0)


async def test_the_end_of_a_sequence(http, engine, engine_script, tokenizer):
    engine_script.stop_at = len(tokenizer.encode("Hello")) + 5
    ended = (await ask(http)).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"], len(ended["token_ids"])) == ("stop", None, 6)
    assert ended["text"] == tokenizer.decode(ended["token_ids"][:5])
    token = ended["token_ids"][2]
    stopped = (await ask(http, stop_token_ids=[token])).json()["choices"][0]
    assert (stopped["stop_reason"], stopped["token_ids"]) == (token, ended["token_ids"][:3])
    assert len(await ids_of(http, ignore_eos=True)) == 12


async def test_what_an_engine_drafts_is_its_own_affair(http):
    assert (await ask(http)).json()["metrics"]["speculative_decoding"]["no_speculation_reason"] == "engine"
    assert (await http.get("/services")).json()["num_speculative_tokens"] == 0


async def test_every_parameter_reaches_the_engine(http, engine):
    given = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.5, "min_tokens": 2, "logit_bias": {"7": 1.5}, "allowed_token_ids": [7, 8],
        "stop_token_ids": [9], "bad_words": ["bad"], "ignore_eos": True, "seed": 2**64 - 3, "max_tokens": 3,
    }  # fmt: skip
    await ids_of(http, **given)
    sent = engine.bodies[0]
    assert {name: sent[name] for name in given} == given | {"seed": -3}


async def test_log_probabilities_keep_token_ids(http, engine, tokenizer):
    choice = (await ask(http, logprobs=2, max_tokens=4)).json()["choices"][0]
    ids = choice["token_ids"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    first = choice["logprobs"]["top_logprobs"][0]
    assert first == {tokenizer.token_text((ids[0] + 1) % 400): -0.25, tokenizer.token_text(ids[0]): -0.5}
    echoed = (await ask(http, logprobs=1, max_tokens=2, echo=True)).json()["choices"][0]
    num_prompt = len(tokenizer.encode("Hello"))
    assert echoed["text"].startswith("Hello")
    assert echoed["logprobs"]["token_logprobs"] == [None, *[-0.5] * (num_prompt - 1 + 2)]
    asked = (await ask(http, prompt_logprobs=1, max_tokens=1)).json()["choices"][0]["prompt_logprobs"]
    second = tokenizer.encode("Hello")[1]
    assert asked[0] is None
    assert {token: entry["rank"] for token, entry in asked[1].items()} == {str((second + 1) % 400): 1, str(second): 2}


async def test_samples_are_requests_of_their_own(http, engine, expected):
    answer = (await ask(http, n=3, temperature=1.0, seed=5)).json()
    seeds = sorted(body["seed"] for body in engine.bodies)
    assert len(set(seeds)) == 3
    assert answer["choices"][0]["token_ids"] == expected(12, seed=5)
    assert len({headers["x-request-id"] for headers in engine.headers}) == 3
    engine.bodies.clear()
    await ids_of(http, n=2, temperature=1.0)
    assert all("seed" not in body for body in engine.bodies)


async def test_grpc_reads_from_engines_too(engine, tokenizer_folder, expected):
    async with (
        gateway_to(engine.address, tokenizer_folder=tokenizer_folder) as (gateway, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(text="Hello", max_tokens=12, sampling={"temperature": 0.0})
        pieces = [piece async for piece in stub.Generate(request)]
        assert [token for piece in pieces for token in piece.token_ids] == expected(12)
        request.speculation.verification = 1
        with pytest.raises(grpc.aio.AioRpcError, match="verification is 'token'") as caught:
            [piece async for piece in stub.Generate(request)]
        request.speculation.Clear()
        request.sampling.bad_token_ids.add(ids=[5, 6])
        with pytest.raises(grpc.aio.AioRpcError, match="bad_token_ids is"):
            [piece async for piece in stub.Generate(request)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_engine_continues_the_trace_of_its_request(engine, tokenizer_folder):
    collector, trace_id = Collector(), "5" * 32
    with collector.listening() as endpoint:
        settings = {"tokenizer_folder": tokenizer_folder, "otlp_traces_endpoint": endpoint}
        async with gateway_to(engine.address, **settings) as (_, http):
            http.headers["traceparent"] = f"00-{trace_id}-{'6' * 16}-01"
            body = {"max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            assert (await ask(http)).status_code == 200
    spans = collector.of_trace(trace_id)
    sent = [headers["traceparent"].split("-")[1:3] for headers in engine.headers if "traceparent" in headers]
    assert sent == [[trace_id, sample.id] for sample in spans["gateway", "sample"]]
    operations = {span.attributes.get("gen_ai.operation.name") for each in spans.values() for span in each}
    assert operations == {"chat", "text_completion", None}


@pytest.mark.parametrize("has_tracing", [False, True])
async def test_an_engine_gets_the_clients_context_where_the_gateway_records_no_span(
    engine, tokenizer_folder, has_tracing
):
    collector, context = Collector(), f"00-{'5' * 32}-{'6' * 16}-00"  # not sampled
    with collector.listening() as endpoint:
        settings = {"otlp_traces_endpoint": endpoint} if has_tracing else {}
        async with gateway_to(engine.address, tokenizer_folder=tokenizer_folder, **settings) as (_, http):
            http.headers["traceparent"] = context
            assert (await ask(http)).status_code == 200
    assert [headers["traceparent"] for headers in engine.headers if "traceparent" in headers] == [context]


async def test_what_an_engine_cannot_honour_is_refused_by_name(http, engine):
    fields = (
        ("verification", "block"),
        ("num_speculative_tokens", 4),
        ("num_speculative_tokens", 0),
        ("method", "ngram"),
    )
    for name, value in fields:
        answer = await ask(http, speculation={name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert "leave it out" in answer.json()["error"]["message"]
    assert (await http.get("/services")).json()["methods"] == []
    assert not engine.bodies


async def test_the_key_is_shown_and_never_logged(engine, tokenizer_folder, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    engine.key = "secret-of-the-engine"
    path = tmp_path / "key"
    path.write_text("secret-of-the-engine\n")
    async with gateway_to(engine.address, tokenizer_folder=tokenizer_folder, target_api_key_file=str(path)) as (
        _,
        http,
    ):
        assert len(await ids_of(http)) == 12
        engine.key = "changed"  # the error it answers with quotes what it was shown
        answer = await ask(http)
        assert answer.status_code == 503
        assert "--target-api-key-file" in answer.json()["error"]["message"]
        assert "[key]" in answer.json()["error"]["message"]
    assert "secret-of-the-engine" not in caplog.text + answer.text


async def test_no_part_of_the_key_is_passed_on(engine, tokenizer_folder):
    key = engine.key = "secret-of-the-engine"
    refusal = {"error": {"message": "x" * 1990 + key, "param": key, "code": 400}}
    engine.refusals = [(400, {}, refusal), (500, {}, refusal), (400, {}, refusal)]
    async with gateway_to(engine.address, tokenizer_folder=tokenizer_folder, target_api_key=key) as (_, http):
        for is_stream in (False, True):
            answer = await ask(http, stream=is_stream)
            assert "xxx[key]" in answer.text
            assert "secret" not in answer.text
    assert not engine.refusals


async def test_engines_join_and_leave(engine, other, tokenizer_folder, tmp_path):
    path = tmp_path / "engines"
    path.write_text(engine.address.removeprefix("openai+"))
    async with gateway_to(f"openai+file:{path}", tokenizer_folder=tokenizer_folder) as (gateway, http):
        expected = await ids_of(http)
        path.write_text(other.address.removeprefix("openai+"))
        replicas = gateway.generation.router.targets
        await until(lambda: [each.name for each in replicas.usable] == [other.address])
        engine.key = "it is not asked any more"
        assert await ids_of(http) == expected


async def test_an_engine_that_does_not_tell_tokens_is_used(engine, tokenizer_folder):
    engine.tokenize = 405
    async with gateway_to(engine.address, tokenizer_folder=tokenizer_folder) as (_, http):
        assert len(await ids_of(http)) == 12


async def test_the_load_is_that_of_all_ranks(engine, tokenizer, tokenizer_folder):
    settings = GatewaySettings(targets=(engine.address,), tokenizer=str(tokenizer_folder))
    target = targets.EngineTarget(engine.address, EngineSpec.read(settings, TextTokenizer.load(str(tokenizer_folder))))
    engine.metrics = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2e+1
vllm:num_requests_waiting{engine="2",model_name="m"} 1.2.3e+-
vllm:num_requests_waiting{engine="3",model_name="m"} 1e999
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
"""
    load = await target.load()
    await target.close()
    assert (load.open_sessions, load.waiting_sessions, load.used_blocks / load.total_blocks) == (7, 21, 0.3)


async def test_new_certificates_reach_an_engine_and_its_open_session(
    engine, tokenizer_folder, tmp_path_factory, monkeypatch, expected
):
    """The first try to use them fails. The session that is open then ends like every other one if the engine hangs."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    for folder in (old, new):
        write_certificates(folder)
    await engine.stop()
    engine.tls = Certificates(TlsFiles(*ssl_flags(old, "target").values())).server_context()
    await engine.start()
    flags = ssl_flags(old, "gateway", "backend_ssl")
    async with gateway_to(engine.address, tokenizer_folder=tokenizer_folder, **flags) as (gateway, http):
        (replica,) = gateway.generation.router.targets.replicas
        backend = replica.backend
        engine.hangs_after = 3
        waiting = asyncio.create_task(ids_of(http, max_tokens=20))
        await until(lambda: engine.num_open)
        make_context, num_made = ssl.create_default_context, 0

        def fail_first(**files):
            nonlocal num_made
            num_made += 1
            if num_made == 1:
                raise OSError("too many open files")
            return make_context(**files)

        monkeypatch.setattr(ssl, "create_default_context", fail_first)
        replace_files(old, new)
        await until(lambda: num_made > 1 and replica.usable)
        assert await ids_of(http, max_tokens=3) == expected(3)
        assert replica.backend is backend
        assert engine.num_open == 1
        monkeypatch.setattr(targets, "ANSWER_TIMEOUT_S", 0.3)
        seen = engine.asked["/health"]
        await until(lambda: engine.asked["/health"] > seen + 1)  # no question has the former time
        engine.hangs = True
        await until(lambda: not engine.num_open)  # the gateway gave the session up
        monkeypatch.setattr(targets, "ANSWER_TIMEOUT_S", 10)
        engine.hangs, engine.hangs_after = False, None
        assert await waiting == expected(20)


async def test_an_engine_that_leaves_needs_no_certificates(engine, other, tokenizer_folder, tmp_path, monkeypatch):
    """They cannot be read any more, and its connections are closed all the same."""
    write_certificates(tmp_path)
    path = tmp_path / "engines"
    await engine.stop()
    engine.tls = Certificates(TlsFiles(*ssl_flags(tmp_path, "target").values())).server_context()
    await engine.start()
    urls = [each.address.removeprefix("openai+") for each in (engine, other)]
    path.write_text("\n".join(urls))
    flags = ssl_flags(tmp_path, "gateway", "backend_ssl")
    async with gateway_to(f"openai+file:{path}", tokenizer_folder=tokenizer_folder, **flags) as (gateway, _):
        replicas = gateway.generation.router.targets.replicas
        (gone,) = (each.backend for each in replicas if each.name == engine.address)

        def fail(**_files):
            raise OSError("no such file")

        monkeypatch.setattr(ssl, "create_default_context", fail)
        path.write_text(urls[1])

        async def is_closed():
            try:
                await gone.load()
            except Unavailable as error:
                return "closed" in str(error)
            return False

        await until(is_closed)
        assert [each.name for each in replicas] == [other.address]


async def test_a_retired_connection_closes_with_its_last_answer(engine):
    connection = connections.EngineConnection(engine.address.removeprefix("openai+"), key=None, tls=TlsFiles())
    body = {"prompt": [5], "max_tokens": 9, "temperature": 1.0, "stream": True}
    answers = [await connection.open("/v1/completions", body, {"X-Request-Id": name}) for name in "ab"]
    await connection.retire()
    for answer in answers:
        assert b"[DONE]" in await connection.read(answer)
        await connection.finish(answer)
    with pytest.raises(Unavailable, match="closed"):
        await connection.get("/health", 1)


async def test_usage_metrics_and_keys(engine, tokenizer_folder):
    engine.num_cached = 1
    settings = {"api_key": ("client-key",), "client_requests_per_minute": 2}
    async with gateway_to(engine.address, tokenizer_folder=tokenizer_folder, **settings) as (_, http):
        assert (await ask(http)).status_code == 401
        http.headers["Authorization"] = "Bearer client-key"
        usage = (await ask(http)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 1
        await ids_of(http, max_tokens=3)
        assert (await ask(http)).status_code == 429
        assert all("authorization" not in headers for headers in engine.headers)
        metrics = (await http.get("/metrics")).text
        assert re.search(r"tandem_generation_tokens_total\S+ 15\.0", metrics)
        assert 'tandem_key_generation_tokens_total{key="key-' in metrics
        assert re.search(r"tandem_time_to_first_token_seconds_count\S+ 2\.0", metrics)


async def test_connections_are_used_again(http, engine):
    for _ in range(20):
        await ids_of(http, max_tokens=2)
    assert engine.num_connections < 10


async def test_a_tandem_gateway_as_an_engine(backends, info, script, tokenizer_folder):
    async with (
        serve(backends, info, script, tokenizer=str(tokenizer_folder)) as upstream,
        gateway_to(f"openai+{upstream.url}/v1", tokenizer_folder=tokenizer_folder) as (_, http),
    ):
        for body in (
            {"max_tokens": 30},
            {"max_tokens": 30, "temperature": 1.0, "seed": 11},
            {"max_tokens": 9, "logprobs": 3, "echo": True},
            {"max_tokens": 3, "prompt_logprobs": 2},
            {"max_tokens": 40, "stop": ["jumps"]},
            {"max_tokens": 4, "bad_words": ["fox"], "logit_bias": {"5": 2.0}},
        ):
            direct, through = (await ask(upstream.http, **body)).json(), (await ask(http, **body)).json()
            assert through["choices"] == direct["choices"]
            assert through["usage"] == direct["usage"]
    upstream.assert_all_closed()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ("openai+http://a:1", "b:2")}, "engines and Tandem's own b:2"),
        ({"targets": ("openai+file:a", "file:b")}, "engines and Tandem's own file:b"),
        ({"drafts": ("a:1",)}, "drafts is .*engines cannot honour"),
        (
            {"targets": ("a:1",), "drafts": ("openai+http://b:1",)},
            "drafts holds openai.http://b:1, and engines draft for themselves only",
        ),
        ({"verification": "block"}, "verification is .*engines cannot honour"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens is 8, which engines cannot honour"),
        ({"max_client_kv_share": 0.5}, "max_client_kv_share is 0.5, which engines cannot honour"),
        ({"tokenizer": None}, "tokenizer is not given"),
        ({"target_api_key": "a", "target_api_key_file": "b"}, "both given"),
    ],
)
def test_options_that_engines_cannot_honour(settings, message):
    with pytest.raises(InvalidRequest, match=message):
        GatewaySettings(**{"targets": ("openai+http://a:1",), "tokenizer": "folder"} | settings)

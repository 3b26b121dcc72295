"""API keys: on every path but health, over REST and gRPC; a file of hashes that may change; browsers."""

import json
import os
import re
import subprocess
import sys

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.access import keys as keys_module
from gateway.access.keys import KeyRing, digest_of
from gateway.main import main
from gateway.rest.anthropic_errors import is_anthropics
from specdec.errors import InvalidRequest, Unauthenticated
from specdec.rpc.channel import open_channel
from specdec.settings import AccessSettings
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from tandem.cli.main import main as tandem
from tests.gateway.conftest import serve
from tests.until import until

GENERATE = {"prompt": [5], "max_tokens": 3}


def line_of(name, key, **limits):
    return json.dumps({"name": name, "sha256": digest_of(key).hex(), **limits}) + "\n"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("stand", [{"api_key": ("one", "two")}], indirect=True)
async def test_every_path_but_health_asks_for_a_key(stand):
    paths = [
        *[("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")],
        *[("GET", path) for path in ("/v1/models", "/v1/models/x", "/version", "/metrics", "/", "/nothing")],
        *[
            ("GET", "/services"),
            ("GET", "/tokenizer_info"),
            ("POST", "/v1/responses"),
            ("GET", "/v1/responses/x"),
            ("DELETE", "/v1/responses/x"),
            ("POST", "/v1/responses/x/cancel"),
            ("GET", "/v1/responses/x/input_items"),
            ("POST", "/v1/messages"),
            ("POST", "/v1/messages/count_tokens"),
        ],
        ("GET", "/openapi.json"),
    ]
    described = (await stand.http.get("/openapi.json", headers=bearer("one"))).json()["paths"].keys()
    described = {re.sub(r"{\w+}", "x", path) for path in described}
    assert described - {"/health"} <= {path for _, path in paths}
    for method, path in paths:
        for headers in (
            {},
            bearer("three"),
            {"Authorization": "Bearer"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
            {"X-Api-Key": "three"},
        ):
            answer = await stand.http.request(method, path, headers=headers, json=GENERATE)
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            error = answer.json()["error"]
            if is_anthropics(path):
                assert error["type"] == "authentication_error"
                continue
            assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert (await stand.http.get("/health")).status_code == 200
    for key in ("one", "two"):
        assert (await stand.http.post("/v1/completions", headers=bearer(key), json=GENERATE)).status_code == 200
        assert (await stand.http.get("/metrics", headers={"authorization": f"bearer {key}"})).status_code == 200
    assert len(stand.targets[0].specs) == 2


@pytest.mark.parametrize("stand", [{"api_key": ("one",)}], indirect=True)
async def test_openais_client_knows_the_error(stand):
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.completions.create(model="toy-model", prompt="a", max_tokens=2)
        assert caught.value.code == "invalid_api_key"
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="one", max_retries=0) as client:
        assert (await client.completions.create(model="toy-model", prompt="a", max_tokens=2)).choices[0].text


@pytest.mark.parametrize("stand", [{"api_key": ("one",)}], indirect=True)
async def test_grpc_asks_for_the_same_keys(stand):
    async with open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        request = pb.GenerateRequest(text="a", max_tokens=3)
        for metadata in (None, (("authorization", "Bearer two"),), (("authorization", "one"),)):
            calls = [
                stub.Generate(request, metadata=metadata).read(),
                stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=metadata),
                stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=metadata),
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                reflection.ServerReflectionInfo(iter([listing]), metadata=metadata).read(),
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        allowed = (("authorization", "Bearer one"),)
        with pytest.raises(grpc.aio.AioRpcError, match="sent more than once") as caught:
            await stub.ListModels(pb.ListModelsRequest(), metadata=(*allowed, *allowed))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=allowed)).models
        assert [piece async for piece in stub.Generate(request, metadata=allowed)]
        found = await reflection.ServerReflectionInfo(iter([listing]), metadata=allowed).read()
        assert found.list_services_response.service
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_without_keys_everybody_may(stand):
    assert (await stand.http.post("/v1/completions", headers=bearer("any"), json=GENERATE)).status_code == 200
    assert (await stand.http.post("/v1/completions", json=GENERATE)).status_code == 200


def test_a_file_of_hashes_is_read_again_when_it_changes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keys_module, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "keys"
    path.write_text("# people\n\n" + line_of("alice", "a", max_client_requests=3) + line_of("bob", "b"))
    ring = KeyRing(AccessSettings(api_key_file=str(path), api_key=("given",), max_client_requests=9))

    def caller(key):
        return ring.caller(f"Bearer {key}", "10.0.0.1")

    assert (caller("a").key, caller("a").limits.max_client_requests) == ("alice", 3)
    assert (caller("b").client, caller("b").limits.max_client_requests) == ("bob", 9)
    assert caller("given").key.startswith("key-")
    path.write_text(line_of("bob", "b") + line_of("carol", "c"))
    os.utime(path, (1.0, 1.0))  # the clock of files may not have moved on
    assert caller("c").key == "carol"
    with pytest.raises(Unauthenticated):
        caller("a")
    path.write_text("nonsense")
    assert caller("c").key == "carol", "a file that cannot be read locks nobody out"
    path.unlink()
    assert caller("c").key == "carol"
    assert "line 1" in caplog.text


@pytest.mark.parametrize(
    "damage", [None, b"{", b"[" * 100_000, b"\xff\xfe", b"\0"], ids=["deleted", "cut", "deep", "no text", "zeros"]
)
def test_a_damaged_file_is_told_once(tmp_path, monkeypatch, caplog, damage):
    """Until it is mended; meanwhile the keys stay."""
    monkeypatch.setattr(keys_module, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "keys"
    path.write_text(line_of("alice", "a"))
    ring = KeyRing(AccessSettings(api_key_file=str(path)))
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    for _ in range(3):
        assert ring.caller("Bearer a", "").key == "alice"
        assert ring.problem
    assert caplog.text.count("the keys stay as they are") == 1
    assert not [record for record in caplog.records if record.exc_info]
    path.write_text(line_of("bob", "b"))
    assert ring.caller("Bearer b", "").key == "bob"
    assert not ring.problem


async def test_metrics_tell_whether_the_file_is_in_use(tmp_path, backends, info, script, tokenizer_folder):
    path = tmp_path / "keys"
    path.write_text(line_of("alice", "a"))
    async with serve(backends, info, script, api_key_file=str(path), tokenizer=str(tokenizer_folder)) as stand:

        async def is_in_use():
            text = (await stand.http.get("/metrics", headers=bearer("a"))).text
            return float(re.search(r"^tandem_key_file_up\S* (\S+)$", text, re.MULTILINE)[1])

        assert await is_in_use()
        path.unlink()

        async def is_told():
            return not await is_in_use()

        await until(is_told)


def test_an_empty_file_lets_nobody_in(tmp_path):
    path = tmp_path / "keys"
    path.write_text("")
    with pytest.raises(Unauthenticated):
        KeyRing(AccessSettings(api_key_file=str(path))).caller(None, "10.0.0.1")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sk-secret", "line 1: it is no JSON object; make a line with: tandem key NAME"),
        ("\n[]", "line 2: it is no JSON object"),
        ('{"name": "a b", "sha256": ""}', "name is 'a b'"),
        ('{"name": "a", "sha256": "AB"}', "64 hexadecimal digits"),
        (line_of("a", "x") + line_of("a", "y"), "line 2: the name 'a' stands there twice"),
        (line_of("a", "x", limit=3), "'limit' is unknown"),
        (line_of("a", "x", max_client_requests=0), "max_client_requests is 0; it must be at least 1"),
        (line_of("a", "x", max_client_requests="3"), "it must be a whole number"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, match):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=match):
        KeyRing(AccessSettings(api_key_file=str(path)))


def test_a_missing_file_and_unusable_keys_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--targets", "a:1", "--api-key-file", str(tmp_path / "none")])
    assert "cannot read api_key_file" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match=r"number 2 .* holds a space"):
        AccessSettings(api_key=("a", "b c"))


def test_a_key_is_made_with_its_line(tmp_path, capsys):
    assert tandem(["key", "alice", "--client-tokens-per-minute", "500"]) == 0
    made = capsys.readouterr()
    (tmp_path / "keys").write_text(made.out)
    key = made.err.split()[-1]
    assert key not in made.out
    caller = KeyRing(AccessSettings(api_key_file=str(tmp_path / "keys"))).caller(f"Bearer {key}", "")
    assert (caller.key, caller.limits.client_tokens_per_minute) == ("alice", 500)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65])
def test_a_key_whose_line_would_damage_the_file_is_not_made(name, capsys):
    assert tandem(["key", name]) == 2
    made = capsys.readouterr()
    assert not made.out
    assert "use 1 to 64 letters, digits, dots" in made.err


def test_keys_of_the_environment_are_read_and_never_shown():
    call = [
        sys.executable,
        "-c",
        "import sys, gateway.app as a, gateway.main as m; a.Gateway = lambda s: sys.exit(repr(s.api_key))",
    ]
    call[-1] += "; m.main(sys.argv[1:])"
    env = os.environ | {"TANDEM_API_KEY": "one, two"}

    def run(*flags):
        return subprocess.run([*call, "--targets", "a:1", *flags], env=env, capture_output=True, text=True, check=False)

    assert "('one', 'two')" in run().stderr
    assert "('three',)" in run("--api-key", "three").stderr, "a flag goes before the environment"
    helped = run("--help").stdout
    assert "TANDEM_API_KEY" in helped
    assert "one, two" not in helped


@pytest.mark.parametrize("blank", ["", " ", ",", " , ,"])
def test_a_blank_variable_is_no_open_server(blank, monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_API_KEY", blank)
    with pytest.raises(SystemExit):
        main(["--targets", "a:1"])
    assert "api_key number 1 (--api-key, or TANDEM_API_KEY) holds" in capsys.readouterr().err


@pytest.mark.parametrize("stand", [{"api_key": ("one",), "allowed_origins": ("https://page.example",)}], indirect=True)
async def test_browsers_may_use_the_pages_named(stand):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = await stand.http.options("/v1/completions", headers=ask | {"Origin": "https://page.example"})
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Origin"] == "https://page.example"
    refused = await stand.http.options("/v1/completions", headers=ask | {"Origin": "https://other.example"})
    assert "Access-Control-Allow-Origin" not in refused.headers
    origin = {"Origin": "https://page.example"}
    for headers, status in ((bearer("one"), 200), ({}, 401)):
        answer = await stand.http.post("/v1/completions", headers=headers | origin, json=GENERATE)
        assert answer.status_code == status
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"


async def test_by_default_no_page_may(stand):
    answer = await stand.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    with pytest.raises(InvalidRequest, match="write each as scheme"):
        AccessSettings(allowed_origins=('["*"]',))
    with pytest.raises(InvalidRequest, match="every web page could act for a browser's user"):
        AccessSettings(allowed_origins=("*",), allow_credentials=True)

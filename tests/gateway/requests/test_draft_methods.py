"""The drafting method of a request: what is offered, that it drafts, and that losing it costs speed only."""

import asyncio
from functools import cache

import grpc
import httpx
import pytest

from gateway.decoding.draft_client import DraftClient
from gateway.decoding.drafters import Drafters
from gateway.generation import Generation
from gateway.placement.routing import Replica
from gateway.requests.types import GenerationRequest
from specdec.compiler import MACHINE_FLAGS
from specdec.errors import DeadlineExceeded, InvalidRequest, Unavailable
from specdec.lookup import suffix_tree
from specdec.params import SamplingParams
from specdec.rpc.channel import open_channel
from specdec.settings import GatewaySettings
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import generation_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2
from tests.draft_first import draft_first
from tests.gateway.conftest import router_of, serve
from tests.gateway.fake_draft import FakeDraft, draft_info
from tests.gateway.fakes import Faults
from tests.gateway.rest.test_rest import body_of, chat_of, post

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
MODELS = ("draft_model", "eagle3")
LOOKUPS = ("ngram", "suffix")
PAIRS = [f"{lookup}+{other}" for lookup in LOOKUPS for other in (*MODELS, *LOOKUPS) if lookup != other]


@pytest.fixture
def two_drafts(backends, script):
    """Two draft services of different methods, open before the target."""
    (target,), drafts = backends
    drafts[:] = [FakeDraft(next_token=script, info=info_of(method)) for method in MODELS]
    for draft in drafts:
        draft_first(target, draft)
    return drafts


def info_of(method, **changes):
    return draft_info(vocab_size=400, tokenizer_size=400, method=method, name=method, **changes)


async def generate(generation, method="", params=GREEDY, **given):
    request = GenerationRequest(prompt=[5, 6], params=params, method=method, return_token_metrics=True, **given)
    result = await generation.generate(request)
    (sample,) = result.samples
    return sample.token_ids, {str(each.origin) for each in sample.token_metrics}, result.speculation


def offers_of(generation):
    return {name: method.max_tokens for name, method in generation.draft_methods.offered.items()}


async def test_what_is_offered(two_drafts, backends, make_generation):
    offered = offers_of(make_generation())
    assert set(offered) == {*MODELS, *LOOKUPS, *PAIRS}
    assert [offered[name] for name in ("draft_model", "eagle3", "ngram", "suffix", "suffix+eagle3")] == [
        4,
        4,
        32,
        32,
        32,
    ]
    assert offers_of(make_generation(num_speculative_tokens=0)) == {}
    assert set(offers_of(make_generation(num_speculative_tokens=48)).values()) == {48}
    backends[1].pop()
    # The gateway's own comes first, with its own length.
    assert next(iter(offers_of(make_generation()).items())) == ("draft_model", 4)
    assert next(iter(offers_of(make_generation(lookup=("suffix",))).items())) == ("suffix+draft_model", 4)


@pytest.mark.parametrize("lookup", [("suffix",), ("ngram", "suffix")])
async def test_the_servers_own_always_has_its_own_length(two_drafts, make_generation, lookup):
    generation = make_generation(lookup=lookup)
    names = ["+".join((*lookup, model)) for model in MODELS]
    assert [offers_of(generation)[name] for name in names] == [4, 4]
    generation.router.drafts.replicas[0].info = None  # has not answered yet
    assert [offers_of(generation)[name] for name in names] == [4, 4]
    assert generation.draft_methods.choose("+".join((*lookup, "medusa"))).max_tokens == 4
    assert generation.draft_methods.choose("suffix").max_tokens == 32


@pytest.mark.parametrize("name", [*MODELS, *LOOKUPS, *PAIRS])
async def test_each_method_drafts(two_drafts, make_generation, name):
    """Text that repeats has long matches: of a pair the lookup drafts, once it has seen enough."""
    generation = make_generation()
    plain, _, _ = await generate(generation, num_speculative_tokens=0)
    token_ids, origins, _ = await generate(generation, name)
    assert token_ids == plain
    parts = name.split("+")
    assert ("draft" in origins) is bool({*parts} & {*MODELS})
    assert ("lookup" in origins) is bool({*parts} & {*LOOKUPS})
    assert [draft.num_opened > 0 for draft in two_drafts] == [method in parts for method in MODELS]


async def test_pacing_is_told_what_drafts(two_drafts, make_generation):
    """Also where a request leaves it to a gateway with drafts of several methods."""
    generation, paced = make_generation(), []
    pace = generation.context.pace
    generation.context.pace = lambda replica, limit, drafter: paced.append(drafter) or pace(replica, limit, drafter)
    opened = []
    for number in range(6):
        before = two_drafts[0].num_opened
        await generate(generation, session_id=f"s{number}")  # the name decides on the draft
        opened.append(MODELS[two_drafts[0].num_opened == before])
    assert paced == opened
    assert {*opened} == {*MODELS}
    paced.clear()
    for name in ("eagle3", "suffix+draft_model", "suffix"):
        await generate(generation, name)
    assert paced == ["eagle3", "draft_model", ""]


async def test_pacing_is_told_when_a_draft_of_another_method_goes_on(
    two_drafts, make_generation, monkeypatch, short_pauses
):
    request = DraftClient.request

    async def request_when_open(self, k, **more):
        if self._opening is not None and self.has_proposed:
            await asyncio.wait((self._opening,))
        return await request(self, k, **more)

    monkeypatch.setattr(DraftClient, "request", request_when_open)
    for draft in two_drafts:
        draft.faults = Faults(propose={3: Unavailable("gone")})
    generation, paced = make_generation(), []
    pace = generation.context.pace
    generation.context.pace = lambda replica, limit, drafter: paced.append(drafter) or pace(replica, limit, drafter)
    await generate(generation)
    assert len(paced) >= 2
    assert {*paced[:2]} == {*MODELS}


async def test_hidden_states_are_those_of_the_method(two_drafts, backends, make_generation):
    two_drafts[1].model = info_of("eagle3", hidden_state_layers=(1, 2))
    generation = make_generation()
    for name, layers in (("eagle3", (1, 2)), ("draft_model", ()), ("suffix+eagle3", (1, 2)), ("suffix", ())):
        await generate(generation, name)
        assert backends[0][0].specs[-1].hidden_state_layers == layers


async def test_lengths(two_drafts, backends, make_generation):
    (target,), generation = backends[0], make_generation()
    for name, asked, wanted in (
        ("", None, 4), ("", 32, 4), ("draft_model", 32, 4), ("eagle3", 2, 2), ("ngram", None, 32), ("ngram", 8, 8),
        ("ngram", 64, 32), ("suffix+eagle3", None, 32), ("suffix+eagle3", 8, 8), ("suffix", 0, 0),
    ):  # fmt: skip
        await generate(generation, name, num_speculative_tokens=asked)
        assert target.specs[-1].num_speculative_tokens == wanted, (name, asked)
    await generate(generation, "ngram", SamplingParams(temperature=0.0, max_tokens=10))
    assert target.specs[-1].num_speculative_tokens == 9
    assert max(spec.num_speculative_tokens for draft in two_drafts for spec in draft.specs) == 4


async def test_the_servers_own_is_named_by_all_that_drafts_there(two_drafts, make_generation):
    """Alone, its parts are what their names say."""
    two_drafts.pop()
    generation = make_generation(lookup=("ngram",))
    wanted = {
        "ngram+draft_model": None,
        "ngram": Drafters(("ngram",), None),
        "draft_model": Drafters((), "draft_model"),
    }
    for name, drafters in wanted.items():
        assert generation.draft_methods.choose(name).drafters == drafters
    (replica,) = generation.router.drafts.replicas
    replica.info = None  # one that has not answered may draft by anything
    assert generation.draft_methods.choose("ngram").drafters == Drafters(("ngram",), None)


async def test_requests_that_need_a_lookup_first_at_once_share_it(make_generation):
    generation = make_generation()
    await asyncio.gather(*(generate(generation, "suffix") for _ in range(3)))
    assert generation.context.lookups["suffix"].past.of("").cache.size.num_requests == 3


async def test_suffix_is_made_when_it_is_needed_and_remembers_by_key(make_generation):
    generation = make_generation()
    assert generation.context.lookups == {}
    await generate(generation, "suffix")
    assert list(generation.context.lookups) == ["suffix"]
    await generate(generation, "ngram")
    made = dict(generation.context.lookups)
    await generate(generation, "suffix+ngram")
    assert generation.context.lookups == made
    assert made["suffix"].past.of("").cache.size.num_requests == 2  # not those that other methods drafted
    assert made["suffix"].past.of("other").cache.size.num_requests == 0


async def test_without_a_compiler_suffix_is_not_offered(make_generation, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    generation = make_generation()
    assert list(offers_of(generation)) == ["draft_model", "ngram", "ngram+draft_model"]
    with pytest.raises(InvalidRequest, match="method is 'suffix'; this server offers draft_model, ngram"):
        await generate(generation, "suffix")


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """A folder: its compiler adds a line to ``calls`` for each source, and fails with many words once there is
    ``end``.
    """
    script = f"""[ "$1" = --version ] && exit
echo >> {tmp_path}/calls
for _ in $(seq 3000); do [ -e {tmp_path}/end ] && break; sleep 0.02; done
yes complaint | head -n 100 >&2
exit 1
"""
    (tmp_path / "compiler").write_text(script)
    monkeypatch.setenv("CXX", f"sh {tmp_path}/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(suffix_tree, "load", cache(suffix_tree.load.__wrapped__))
    return tmp_path


async def test_a_compiler_that_fails_is_asked_once(broken_compiler, make_generation, caplog):
    generation = make_generation()
    async with asyncio.timeout(60):
        waiting = [asyncio.create_task(generate(generation, name)) for name in ("suffix", "suffix+draft_model")]
        with pytest.raises(DeadlineExceeded, match="while method suffix was made ready"):
            await generate(generation, "suffix", timeout_s=0.05)
        waiting.pop().cancel()
        _, origins, _ = await generate(generation, "ngram")  # does not wait for it
        assert "lookup" in origins
        (broken_compiler / "end").touch()
        with pytest.raises(InvalidRequest, match="method suffix cannot be used on this server, whose log says why"):
            await waiting[0]
    assert list(offers_of(generation)) == ["draft_model", "ngram", "ngram+draft_model"]
    num_calls = len((broken_compiler / "calls").read_text())
    with pytest.raises(InvalidRequest, match="method is 'suffix'; this server offers draft_model, ngram, "):
        await generate(generation, "suffix")
    assert len((broken_compiler / "calls").read_text()) == num_calls == len(MACHINE_FLAGS)
    (complaint,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert complaint.startswith("method suffix is not offered any more: ")
    assert "complaint complaint" in " ".join(complaint.split())


@pytest.mark.parametrize("name", ["eagle3", "suffix+eagle3"])
async def test_a_lost_draft_is_no_error(two_drafts, make_generation, name):
    generation = make_generation()
    plain, _, _ = await generate(generation, num_speculative_tokens=0)
    lost = generation.router.drafts.replicas[1]
    generation.router.down(lost, "a test")
    expected = {"eagle3": "draft_not_ready", "suffix+eagle3": ""}[name]
    token_ids, origins, speculation = await generate(generation, name)
    assert token_ids == plain
    assert (speculation.no_speculation_reason, "draft" in origins) == (expected, False)
    generation.router.drafts.replicas.remove(lost)  # as discovery does, which may find it again
    token_ids, _, speculation = await generate(generation, name)
    assert (token_ids, speculation.no_speculation_reason) == (plain, expected)
    assert two_drafts[0].num_opened == 0


async def test_a_draft_that_fails_is_not_replaced_by_one_of_another_method(two_drafts, make_generation, short_pauses):
    async def fail(spec):
        raise Unavailable("gone")

    two_drafts[1].open = fail
    _, _, speculation = await generate(make_generation(), "eagle3")
    assert speculation.no_speculation_reason == "draft_failed"
    assert two_drafts[0].num_opened == 0


async def test_a_draft_that_has_not_answered_may_have_any_method(backends, info, tokenizer):
    router = router_of(backends[0], [], info)
    router.drafts.replicas.append(Replica("draft", FakeDraft(), healthy=False))
    generation = Generation(router, GatewaySettings(fixed_draft_length=True), tokenizer)
    for name in ("eagle3", "suffix+medusa"):
        await generate(generation, name)
    with pytest.raises(InvalidRequest, match="'magic'"):
        await generate(generation, "magic")


async def test_a_draft_that_never_answers_is_not_waited_for(make_generation, monkeypatch):
    monkeypatch.setattr("gateway.requests.draft_methods.MAX_UNKNOWN_S", 0.0)
    generation = make_generation(lookup=("ngram",))
    generation.router.drafts.replicas.append(Replica("silent", FakeDraft(), healthy=False))
    assert next(iter(offers_of(generation))) == "ngram+draft_model"
    with pytest.raises(InvalidRequest, match="method is 'medusa'; this server offers ngram"):
        await generate(generation, "medusa")


async def test_a_draft_that_does_not_fit_is_not_offered(two_drafts, make_generation):
    two_drafts[1].model = draft_info(vocab_size=7, tokenizer_size=7, method="eagle3", tokenizer_fingerprint="x")
    assert "eagle3" not in offers_of(make_generation())


async def test_over_rest(two_drafts, stand):
    for path, body in (("/v1/completions", body_of(max_tokens=60)), ("/v1/chat/completions", chat_of(max_tokens=60))):
        plain = (await post(stand, path, **body)).json()["choices"]
        for method in ("eagle3", "suffix+eagle3", ["suffix", "eagle3"]):
            before = [draft.num_opened for draft in two_drafts]
            answer = await post(stand, path, **body, speculation={"method": method})
            assert answer.json()["choices"] == plain
            assert [draft.num_opened for draft in two_drafts] == [before[0], before[1] + 1]
    response = await stand.http.post("/v1/responses", json={"input": "a", "speculation": {"method": "ngram"}})
    assert response.status_code == 200, response.text
    services = (await stand.http.get("/services")).json()
    assert services["methods"][0] == {"name": "draft_model", "num_speculative_tokens": 4}
    assert {each["name"] for each in services["methods"]} == {*MODELS, *LOOKUPS, *PAIRS}


@pytest.mark.parametrize(
    "method", ["medusa", "none", "suffix+suffix", ["ngram", "medusa"], ["eagle3", "ngram"], "x" * 9999]
)
async def test_refusals_over_rest(two_drafts, stand, method):
    opened = stand.targets[0].num_opened  # by the self-test of the head
    for path, body in (
        ("/v1/completions", body_of()), ("/v1/chat/completions", chat_of()), ("/v1/responses", {"input": "a"}),
    ):  # fmt: skip
        response = await stand.http.post(path, json=body | {"speculation": {"method": method}})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, "method", "invalid_request_error")
        assert "this server offers draft_model, eagle3, ngram, suffix, " in error["message"]
        assert len(error["message"]) < 600
    assert stand.targets[0].num_opened == opened


async def test_over_grpc(two_drafts, stand):
    given = {"text": "a", "sampling": types_pb2.SamplingParams(temperature=0.0), "max_tokens": 60}
    async with open_channel(f"127.0.0.1:{stand.gateway.grpc_port}") as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        async def text_of(**options):
            request = pb.GenerateRequest(**given, speculation=pb.SpeculationOptions(**options))
            return "".join([piece.text async for piece in stub.Generate(request)])

        opened = [draft.num_opened for draft in two_drafts]
        assert await text_of(method="suffix+eagle3") == await text_of(num_speculative_tokens=0)
        assert [draft.num_opened for draft in two_drafts] == [opened[0], opened[1] + 1]
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
        assert {each.name for each in model.methods} == {*MODELS, *LOOKUPS, *PAIRS}
        with pytest.raises(grpc.aio.AioRpcError, match="this server offers draft_model") as caught:
            await text_of(method="medusa")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ("tandem-param", "method") in tuple(caught.value.trailing_metadata())


async def test_keys_have_past_outputs_of_their_own(two_drafts, backends, info, script, tokenizer_folder):
    async with serve(backends, info, script, tokenizer=str(tokenizer_folder), api_key=("one", "two")) as stand:
        for key in ("one", "two", "one"):
            async with httpx.AsyncClient(base_url=stand.url, headers={"Authorization": f"Bearer {key}"}) as http:
                answer = await http.post("/v1/completions", json=body_of(speculation={"method": "suffix"}))
                assert answer.status_code == 200
        specs = stand.targets[0].specs[-3:]
        past = stand.generation.context.lookups["suffix"].past
        assert [past.of(spec.owner).cache.size.num_requests for spec in specs] == [2, 1, 2]

"""A draft that lies about q: it chooses the text under a ratio rule, and cannot where drafts are not trusted."""

import asyncio
from dataclasses import replace

import httpx
import numpy as np
import pytest

from engine.sampling.sparse import NUM_LEVELS, pack
from gateway.app import Gateway
from gateway.backends.target import GrpcTarget
from specdec import codec
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.settings import GatewaySettings, ServerSettings
from specdec.types import DraftOpened, Proposal
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import draft_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2
from tests.e2e.servers import TARGET_MODEL
from tests.until import until

K = 4
#: The token that the draft wants in the text. Its q is claimed to be 1 in 50 million, so p / q is above 1 and every
#: ratio rule accepts it.
FORCED = 67
LIE = pack(np.array([FORCED, *range(300, 500)]), np.array([0, *[NUM_LEVELS - 1] * 200]))
SEEDS = range(3)
MAX_TOKENS = 48


class LyingDraft(pb_grpc.DraftServiceServicer):
    """Proposes one token over and over, with the lie. It says that its tokenizer is the target's."""

    def __init__(self, target):
        self.target = target

    async def Draft(self, request_iterator, context):
        spec = codec.decode_open_draft((await context.read()).open)
        await context.write(pb.DraftResponse(opened=codec.encode_draft_opened(DraftOpened(spec.epoch, K))))
        async for request in request_iterator:
            advance = request.advance
            if advance.num_draft_tokens:
                count = min(K, advance.num_draft_tokens)
                length = advance.base_len + len(advance.token_ids)
                proposal = Proposal(spec.epoch, length, (FORCED,) * count, q_rows=(LIE,) * count)
                await context.write(pb.DraftResponse(proposal=codec.encode_proposal(proposal)))

    async def GetModelInfo(self, request, context):
        info = replace(self.target, name="liar", method="draft_model", num_speculative_tokens=K)
        return types_pb2.GetModelInfoResponse(model=codec.encode_model_info(info))


@pytest.fixture
async def complete(stack):
    """``await complete(rule, seed, k, untrusted=…)``: token ids of a sampled text."""
    async with open_channel(stack.targets[0].address) as channel:
        target = await GrpcTarget(channel).info()
    server = RpcServer(ServerSettings())
    server.add(pb_grpc.add_DraftServiceServicer_to_server, LyingDraft(target), "specdec.v1.DraftService")
    await server.start()
    await server.set_serving(True)
    gateways = {}

    async def run(rule, seed, k=K, *, untrusted):
        if untrusted not in gateways:
            settings = GatewaySettings(
                targets=(stack.targets[0].address,),
                drafts=(server.address,),
                tokenizer=TARGET_MODEL,
                port=0,
                grpc_port=0,
                fixed_draft_length=True,
                untrusted_drafts=untrusted,
            )
            gateways[untrusted] = gateway = Gateway(settings)
            await gateway.start()
            await asyncio.wait_for(gateway.wait_ready(), 30)
            await until(lambda: gateway.generation.router.drafts.usable)
        body = {
            "prompt": "def read(path):\n", "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed,
            "ignore_eos": True, "return_token_ids": True,
            "speculation": {"verification": rule, "num_speculative_tokens": k},
        }  # fmt: skip
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"http://127.0.0.1:{gateways[untrusted].port}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        drafted = answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert (drafted > 0) is (k > 0)
        return answer.json()["choices"][0]["token_ids"]

    yield run
    for gateway in gateways.values():
        await gateway.stop()
    await server.stop()


@pytest.mark.parametrize("rule", [pytest.param("token", marks=pytest.mark.exhaustive), "block"])
async def test_a_draft_that_lies_about_q_chooses_the_text_unless_drafts_are_untrusted(complete, rule):
    forced = [token for seed in SEEDS for token in await complete(rule, seed, untrusted=False)]
    assert forced.count(FORCED) > len(forced) / 2  # why a ratio rule needs an honest draft
    for seed in SEEDS:
        plain = await complete("coupled", seed, k=0, untrusted=True)
        assert await complete(rule, seed, untrusted=True) == plain


async def test_requests_that_name_no_rule_are_safe_from_untrusted_drafts(complete):
    assert await complete(None, 3, untrusted=True) == await complete("coupled", 3, k=0, untrusted=True)


async def test_without_a_seed_an_untrusted_draft_does_not_choose_the_text(complete):
    drawn = [token for _ in SEEDS for token in await complete(None, None, untrusted=True)]
    assert drawn.count(FORCED) < len(drawn) / 10

"""``python -m benchmarks.fake_backends``: a target and a draft on one port that compute nothing, at a given pace.

Every session gets its first token at once, and then tokens of a fixed text, a message a ``--pause-ms``. Drafted tokens
are those of the text, so every round accepts all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from specdec import codec
from specdec.errors import InternalError
from specdec.rpc.lifecycle import run
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.types import ModelInfo
from specdec.v1 import draft_service_pb2, draft_service_pb2_grpc, target_service_pb2, target_service_pb2_grpc
from specdec.v1 import types_pb2 as types_pb

VOCAB_SIZE: Final = 4096
MODEL: Final = codec.encode_model_info(
    ModelInfo(name="fake", vocab_size=VOCAB_SIZE, tokenizer_size=VOCAB_SIZE, max_model_len=65536, method="draft_model")
)
#: Tokens of the text, over and over: letters and short words in the bundled tokenizer.
TEXT: Final = tuple(300 + 37 * i % 3000 for i in range(512))


def text_at(position: int, count: int) -> tuple[int, ...]:
    """Tokens of the text from a position on."""
    return tuple(TEXT[(position + i) % len(TEXT)] for i in range(count))


class FakeBackends(target_service_pb2_grpc.TargetServiceServicer, draft_service_pb2_grpc.DraftServiceServicer):
    """Both services."""

    def __init__(self, message_tokens: int, pause_s: float) -> None:
        self._message_tokens, self._pause_s = message_tokens, pause_s

    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """A session: plain decoding until a round comes, one verdict a round."""
        opening = (await context.read()).open
        epoch, length, left = opening.epoch, len(opening.token_ids), opening.multi_step_tokens

        async def answer(count: int, num_drafted: int = 0) -> None:
            nonlocal length
            verdict = target_service_pb2.Verdict(
                epoch=epoch, base_len=length, token_ids=text_at(length, count), num_accepted=max(0, num_drafted),
                num_draft_tokens=num_drafted, num_multi_step_left=left,
            )  # fmt: skip
            length += count
            await context.write(target_service_pb2.VerifyResponse(verdict=verdict))

        rule = opening.verification or types_pb.VERIFICATION_RULE_BLOCK
        opened = target_service_pb2.TargetSessionOpened(epoch=epoch, verification=rule)
        await context.write(target_service_pb2.VerifyResponse(opened=opened))
        await answer(1)
        while True:
            if left:
                await asyncio.sleep(self._pause_s)
                count = min(left, self._message_tokens)
                left -= count
                await answer(count)
                continue
            request = await context.read()
            if request is grpc.aio.EOF:
                return
            if request.WhichOneof("kind") == "multi_step_decode":
                left = request.multi_step_decode.num_tokens
            else:
                await asyncio.sleep(self._pause_s)
                num_drafted = len(request.round.proposal.token_ids)
                await answer(num_drafted + 1, num_drafted)

    async def Draft(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """A session: each call is answered at once."""
        opening = (await context.read()).open
        epoch = opening.epoch
        opened = draft_service_pb2.DraftSessionOpened(
            epoch=epoch, num_speculative_tokens=opening.num_speculative_tokens
        )
        await context.write(draft_service_pb2.DraftResponse(opened=opened))
        while (request := await context.read()) is not grpc.aio.EOF:
            advance = request.advance
            if not advance.num_draft_tokens:
                continue
            length = advance.base_len + len(advance.token_ids)
            proposal = types_pb.Proposal(
                epoch=epoch, base_len=length, token_ids=text_at(length, advance.num_draft_tokens)
            )
            await context.write(draft_service_pb2.DraftResponse(proposal=proposal))

    async def DraftSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """For engines, which are not measured here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this draft is a stand-in for a gateway's")

    async def GetModelInfo(
        self, request: types_pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> types_pb.GetModelInfoResponse:
        """The same for both."""
        return types_pb.GetModelInfoResponse(model=MODEL, load=types_pb.ServerLoad(total_blocks=1))


class FakeService:
    """See :class:`specdec.rpc.lifecycle.Service`."""

    name = "fakes"

    def __init__(self, backends: FakeBackends) -> None:
        self._backends = backends

    def register(self, server: RpcServer) -> None:
        """Both services on one port."""
        server.add(
            target_service_pb2_grpc.add_TargetServiceServicer_to_server, self._backends, "specdec.v1.TargetService"
        )
        server.add(draft_service_pb2_grpc.add_DraftServiceServicer_to_server, self._backends, "specdec.v1.DraftService")

    async def start(self) -> None:
        """Nothing to load."""

    async def wait_failed(self) -> InternalError:
        """Never."""
        never: asyncio.Future[InternalError] = asyncio.get_running_loop().create_future()
        return await never

    async def drain(self) -> None:
        """Nothing to finish."""

    async def stop(self) -> None:
        """Nothing to release."""


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="benchmarks.fake_backends", description=__doc__)
    parser.add_argument("--message-tokens", type=int, default=8, help="tokens of a message in plain decoding")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="before each message of a session")
    parser.add_argument("--max-sessions", type=int, default=1024)
    parser.add_argument("--socket", help="unix:/path to listen on, as well")
    args = parser.parse_args()
    settings = ServerSettings(port=0, socket=args.socket, max_concurrent_rpcs=2 * args.max_sessions + 64, drain_s=0.0)
    return run(lambda: FakeService(FakeBackends(args.message_tokens, args.pause_ms / 1e3)), settings)


if __name__ == "__main__":
    sys.exit(main())

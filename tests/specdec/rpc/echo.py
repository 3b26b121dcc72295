"""A server whose streams answer every round, or misbehave."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from specdec.rpc.channel import (
    open_channel,
)
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as pb

NAME = "specdec.v1.TargetService"


class Echo(target_grpc.TargetServiceServicer):
    """Answers every round with its committed_len; a session id names a misbehaviour."""

    def __init__(self):
        self.error = None
        self.ended = []
        #: Set once a session named "hang" has been read.
        self.hanging = asyncio.Event()
        #: Set once the round of committed_len 999 may be answered.
        self.released = asyncio.Event()

    async def Verify(self, request_iterator, context):
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                if request.WhichOneof("kind") == "open":
                    if self.error is not None:
                        raise self.error
                    if request.open.session_id == "end":
                        return
                    if request.open.session_id == "hang":
                        self.hanging.set()
                        await asyncio.Event().wait()
                    await context.write(target_pb.VerifyResponse(opened=target_pb.TargetSessionOpened(epoch=1)))
                elif request.round.committed_len == 999:
                    await self.released.wait()
                    await context.write(target_pb.VerifyResponse(verdict=target_pb.Verdict(base_len=999)))
                else:
                    verdict = target_pb.Verdict(base_len=request.round.committed_len)
                    await context.write(target_pb.VerifyResponse(verdict=verdict))
        finally:
            self.ended.append(asyncio.current_task().cancelling())

    async def GetModelInfo(self, request, context):
        if self.error is not None:
            raise self.error
        return pb.GetModelInfoResponse(model=pb.ModelInfo(name="x" * 8_000_000))


@asynccontextmanager
async def serving(servicer=None, **settings):
    server = RpcServer(ServerSettings(**settings))
    server.add(target_grpc.add_TargetServiceServicer_to_server, servicer or Echo(), NAME)
    await server.start()
    try:
        await server.set_serving(True)
        async with open_channel(server.address) as channel:
            yield server, channel
    finally:
        await server.stop()


def open_message(session_id=""):
    return target_pb.VerifyRequest(open=target_pb.OpenTargetSession(session_id=session_id))


def round_message(committed_len):
    return target_pb.VerifyRequest(round=target_pb.Round(committed_len=committed_len))

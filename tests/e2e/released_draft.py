"""``python -m tests.e2e.released_draft TARGET``: a draft service of an earlier release, which knows only the fields of
``protos/released.binpb``. It reads the target's last hidden state, in bfloat16 as all did, and copies what followed the
last token before. What it does not understand ends its stream.
"""

import argparse
import asyncio
import json
import signal
from itertools import pairwise
from pathlib import Path

import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2_grpc

RELEASED = Path(__file__).parents[2] / "protos" / "released.binpb"
POOL = DescriptorPool()
for file in FileDescriptorSet.FromString(RELEASED.read_bytes()).file:
    POOL.AddSerializedFile(file.SerializeToString())
#: Numbers of the target's state.
WIDTH = 384


def message(name):
    return GetMessageClass(POOL.FindMessageTypeByName(f"specdec.v1.{name}"))


Request, Response, Info = message("DraftRequest"), message("DraftResponse"), message("GetModelInfoResponse")
assert "group_size" not in message("HiddenStates").DESCRIPTOR.fields_by_name, "the release knows rounded states"


def check_states(states):
    assert states.dtype == "bfloat16", states.dtype
    assert states.num_features == WIDTH, states.num_features
    assert states.data, "no states"
    assert len(states.data) % (2 * WIDTH) == 0, len(states.data)


async def draft(_, context):
    opening = (await context.read()).open
    tokens, waiting = list(opening.token_ids), {}
    await context.write(Response(opened={"epoch": opening.epoch, "num_speculative_tokens": 4}))
    while (request := await context.read()) is not grpc.aio.EOF:
        advance = request.advance
        for states in (request.hidden_states, *advance.hidden_states):
            if states.data:
                check_states(states)
                waiting |= dict.fromkeys(range(states.start, states.start + len(states.data) // (2 * WIDTH)))
        if request.WhichOneof("kind") != "advance":
            continue
        tokens[advance.base_len :] = advance.token_ids
        if advance.num_draft_tokens:
            assert len(tokens) - 2 in waiting, "the newest token came without the state it was predicted from"
            places = [i for i, (first, _) in enumerate(pairwise(tokens)) if first == tokens[-1]]
            drafted = tokens[places[-1] + 1 :][: advance.num_draft_tokens] if places else []
            proposal = {"epoch": opening.epoch, "base_len": len(tokens), "token_ids": drafted}
            await context.write(Response(proposal=proposal))


async def serve(target, port):
    async with grpc.aio.insecure_channel(target) as channel:
        ask = channel.unary_unary("/specdec.v1.TargetService/GetModelInfo", lambda _: b"", Info.FromString)
        known = (await ask(None)).model
    model = {name: getattr(known, name) for name in ("vocab_size", "tokenizer_size", "tokenizer_fingerprint")}
    info = Info(
        model={**model, "name": "old", "method": "eagle", "num_speculative_tokens": 4, "hidden_state_layers": [-1]}
    )

    async def get_info(_, context):
        return info

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "specdec.v1.DraftService",
                {
                    "Draft": grpc.stream_stream_rpc_method_handler(
                        draft, Request.FromString, Response.SerializeToString
                    ),
                    "GetModelInfo": grpc.unary_unary_rpc_method_handler(get_info, None, Info.SerializeToString),
                },
            )
        ]
    )
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(json.dumps({"ready": True, "port": port}), flush=True)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(serve(args.target, args.port))

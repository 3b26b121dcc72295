"""What is tried, part by part: a strategy of inputs, and what must hold for each of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from hypothesis import strategies as st

from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.reliability.fuzz.bodies import Ask, asks
from tests.reliability.fuzz.liars import DRAFT_LIES, TARGET_LIES, Liars
from tests.reliability.fuzz.messages import Damage, damages, variations_of
from tests.reliability.fuzz.services import DRAFTERS, Services
from tests.reliability.fuzz.talks import (
    ENDS,
    TARGET_TALKS,
    Talk,
    draft_talks,
    engine_talks,
    fit_draft,
    fit_engine,
    fit_target,
    hold,
    read_proposal,
    read_step,
    read_verdict,
)

#: Answers to a REST request that say whose fault it is; 500 is not among them.
STATUSES = {200, 204, 307, 400, 401, 404, 405, 413, 415, 422, 429}
#: Drafters whose service is also asked as an engine asks it.
ENGINE_DRAFTERS = (("draft_model",), ("none",))
_REQUESTS = (
    ("Generate", pb.GenerateRequest(text="Hello", max_tokens=4)),
    (
        "Generate",
        pb.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=[5, 6, 7]),
            max_tokens=6,
            sampling=types_pb2.SamplingParams(temperature=0.9),
            speculation=pb.SpeculationOptions(num_speculative_tokens=3),
        ),
    ),
    ("Tokenize", pb.TokenizeRequest(text="Hello")),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[5, 6])),
    ("ListModels", pb.ListModelsRequest()),
)


@dataclass(frozen=True)
class Part:
    """One interface, the inputs for it, and its share of them."""

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], Awaitable[None]]
    weight: float


def parts_of(services: Services, liars: Liars) -> list[Part]:
    """All interfaces, drafter by drafter."""
    requests = st.one_of(
        [st.tuples(st.just(name), st.builds(_damaged, variations_of(valid), damages)) for name, valid in _REQUESTS]
    )
    return [
        Part("REST", asks(), partial(check_rest, services), 25),
        Part("public gRPC", requests, partial(check_public, services), 20),
        Part("target", TARGET_TALKS, partial(check_target, services), 20),
        *(
            Part(f"draft {'+'.join(methods)}", draft_talks(num), partial(check_draft, services, methods), 2.5)
            for methods, num in DRAFTERS.items()
        ),
        Part("engine", engine_talks(), partial(check_engine, services), 5),
        Part("lying target", TARGET_LIES, liars.check_target, 3),
        Part("lying draft", DRAFT_LIES, liars.check_draft, 5),
    ]


def _damaged(message: Any, damage: Damage) -> bytes:
    return damage.apply(message.SerializeToString())


async def check_rest(services: Services, ask: Ask) -> None:
    """The answer blames the request or is one; an error has a message."""
    answer = await services.http.request(ask.method, ask.path, headers=ask.headers, content=ask.body)
    assert answer.status_code in STATUSES, f"{answer.status_code}: {answer.text}"
    response: dict[str, Any] = {}
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    elif "text/event-stream" in answer.headers.get("content-type", ""):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        last = {} if events[-1] == "[DONE]" else json.loads(events[-1])
        assert last.get("type") in (None, "response.completed", "response.incomplete")
        assert last == {} or "response" in last or last["error"]["message"]
        assert '"code":500' not in answer.text.replace(" ", "")
        response = last.get("response", {})
    elif (ask.method, ask.path) == ("POST", "/v1/responses"):
        response = answer.json()
    if response:
        await _check_kept(services, response)


async def _check_kept(services: Services, response: dict[str, Any]) -> None:
    """A response that is kept is given, listed and forgotten; another one is unknown."""
    path, is_kept = f"/v1/responses/{response['id']}", response["store"]
    given = await services.http.get(path)
    assert given.json() == response if is_kept else given.status_code == 404, given.text
    items = await services.http.get(f"{path}/input_items?limit=100")
    assert items.json()["data"] if is_kept else items.status_code == 404, items.text
    cancelled = await services.http.post(f"{path}/cancel")
    assert cancelled.status_code == (400 if is_kept else 404), cancelled.text
    for is_there in (is_kept, False):
        assert (await services.http.delete(path)).status_code == (200 if is_there else 404)


async def check_public(services: Services, request: tuple[str, bytes]) -> None:
    """A call ends with an answer, or with a status that blames the request."""
    name, data = request
    kind = "unary_stream" if name == "Generate" else "unary_unary"
    call = getattr(services.public, kind)(f"/specdec.v1.GenerationService/{name}")(data, timeout=20)
    if name == "Generate":
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    code = await call.code()
    assert code in ENDS | {grpc.StatusCode.NOT_FOUND}, f"{code}: {await call.details()}"
    assert code is grpc.StatusCode.OK or await call.details()


async def check_target(services: Services, talk: Talk) -> None:
    """The stream ends with a status that blames the client, and its session is released."""
    call = services.target_channel.stream_stream("/specdec.v1.TargetService/Verify")()
    code = await hold(call, talk, fit_target, read_verdict)
    assert code in ENDS, f"{code}: {await call.details()}"
    await _until_free(services.target)


async def check_draft(services: Services, methods: tuple[str, ...], talk: Talk) -> None:
    """The same for a drafter."""
    call = services.draft_channels[methods].stream_stream("/specdec.v1.DraftService/Draft")()
    code = await hold(call, talk, fit_draft, read_proposal)
    assert code in ENDS, f"{code}: {await call.details()}"
    await _until_free(services.drafts[methods])


async def check_engine(services: Services, talk: Talk) -> None:
    """The same for an engine with many sessions on one stream."""
    for methods in ENGINE_DRAFTERS:
        call = services.draft_channels[methods].stream_stream("/specdec.v1.DraftService/DraftSteps")()
        code = await hold(call, talk, fit_engine, read_step)
        assert code in ENDS, f"{code}: {await call.details()}"
        await _until_free(services.drafts[methods])


async def _until_free(core: Any) -> None:
    async with asyncio.timeout(10):
        while (load := await core.load()).open_sessions or load.waiting_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

"""A session id belongs to its key."""

import asyncio

import pytest

from tests.gateway.conftest import serve
from tests.until import until


@pytest.fixture
async def stand(backends, info, script):
    async with serve(backends, info, script, api_key=("one", "two")) as stand:
        yield stand


async def post(stand, key, session_id):
    body = {"prompt": [5], "max_tokens": 3, "session_id": session_id}
    answer = await stand.http.post("/v1/completions", headers={"Authorization": f"Bearer {key}"}, json=body)
    assert answer.status_code == 200


async def test_keys_have_sessions_of_their_own(stand):
    for key in ("one", "two", "one"):
        await post(stand, key, "chat")
    first, second, again = stand.targets[0].specs
    assert first.session_id == again.session_id != second.session_id
    assert first.owner == again.owner != second.owner
    drafts = [(spec.session_id, spec.owner) for spec in stand.drafts[0].specs]
    assert drafts == [(spec.session_id, spec.owner) for spec in stand.targets[0].specs]


async def test_no_id_reaches_into_another_key(stand):
    await post(stand, "one", "chat")
    name = stand.targets[0].specs[0].session_id
    await post(stand, "two", name)
    await post(stand, "two", f"../{name}")
    assert len({spec.session_id for spec in stand.targets[0].specs}) == 3


async def test_salts_reach_target_and_draft(stand):
    body = {"prompt": [5], "max_tokens": 3, "cache_salt": "mine"}
    answer = await stand.http.post("/v1/completions", headers={"Authorization": "Bearer one"}, json=body)
    assert answer.status_code == 200
    assert "x-tandem-ignored-fields" not in answer.headers
    assert [(spec.cache_salt, spec.is_named) for spec in stand.targets[0].specs + stand.drafts[0].specs] == [
        ("mine", False)
    ] * 2
    answer = await stand.http.post(
        "/v1/completions", headers={"Authorization": "Bearer one"}, json=body | {"cache_salt": "x" * 10_000}
    )
    assert answer.json()["error"]["param"] == "cache_salt"


async def test_two_requests_of_a_session_at_once_both_have_its_name(stand):
    (target,) = stand.targets
    target.frozen.clear()
    held = asyncio.create_task(post(stand, "one", "chat"))
    other = asyncio.create_task(post(stand, "two", "chat"))
    await until(lambda: stand.generation.num_requests == 2)
    target.frozen.set()
    await asyncio.gather(held, other)
    assert all(spec.is_named for spec in target.specs)

"""Rendezvous hashing, health, and drafts that do not fit."""

import pytest

from gateway.placement.routing import Pool, Replica, Router
from gateway.telemetry.load_collector import LoadCollector
from specdec.errors import ModelNotSupported, Unavailable
from specdec.types import ServerLoad
from tests.gateway.fake_draft import FakeDraft, draft_info
from tests.gateway.fakes import FakeTarget, target_info

SESSIONS = [f"session-{i}" for i in range(600)]


def pool_of(count):
    return Pool([Replica(f"host{i}:1", FakeTarget()) for i in range(count)])


async def test_sessions_spread_and_stay():
    pool = pool_of(3)
    before = {session: pool.pick(session).name for session in SESSIONS}
    counts = [list(before.values()).count(replica.name) for replica in pool.replicas]
    assert all(140 < count < 260 for count in counts)
    pool.replicas[1].healthy = False
    after = {session: pool.pick(session).name for session in SESSIONS}
    assert all(before[session] in (name, "host1:1") for session, name in after.items())
    assert "host1:1" not in after.values()
    pool.replicas[1].healthy = True
    assert {session: pool.pick(session).name for session in SESSIONS} == before


def test_busy_share_counts_what_sessions_waited_for(monkeypatch):
    replica = Replica("draft", FakeDraft())
    shares = []
    for now_s, busy_s in ((100, 7), (102, 8), (103, 8.5), (104, 0.1), (105, 0.2)):
        monkeypatch.setattr("gateway.placement.routing.time.monotonic", lambda now_s=now_s: now_s)
        replica.note_load(ServerLoad(busy_ns=int(busy_s * 1e9)))
        shares.append(replica.busy_share)
    # Nothing is known at first; after a restart the last share stands until two answers can be compared.
    assert shares == pytest.approx([0, 0.5, 0.5, 0.5, 0.1])


async def test_replicas_that_failed_are_passed_over_while_there_are_others():
    pool = pool_of(2)
    first = pool.pick("s")
    first.avoid()
    second = pool.pick("s")
    assert second is not first
    second.avoid()
    assert pool.pick("s") is first
    assert pool.pick("s", avoid={first}) is second
    second.healthy = False
    assert pool.pick("s", avoid={first}) is first
    first.healthy = False
    assert pool.pick("s") is None


async def test_the_first_target_decides_what_is_served(caplog):
    targets = [Replica(f"t{i}", FakeTarget(), healthy=False) for i in range(2)]
    draft = Replica("d", FakeDraft(), healthy=False)
    router = Router(targets, [draft])
    with pytest.raises(Unavailable, match="no target service has answered"):
        router.model()
    assert not router.ready
    router.draft_up(draft, draft_info(tokenizer_fingerprint="other"))
    assert router.draft_model() is not None
    router.target_up(targets[0], target_info())
    assert router.draft_model() is None
    assert "different tokenizers" in draft.refusal
    router.target_up(targets[1], target_info(name="another", tokenizer_fingerprint="other"))
    assert [replica.usable for replica in targets] == [True, False]
    router.draft_up(draft, draft_info())
    assert router.pick_draft("s") is draft
    # Only when nobody serves the old model any more does another take its place.
    router.down(targets[0], "test")
    assert not router.ready
    router.target_up(targets[0], target_info(name="another", tokenizer_fingerprint="other"))
    assert [replica.usable for replica in (*targets, draft)] == [True, True, False]
    assert router.model().name == "another"
    for target in targets:
        router.down(target, "test")
    router.target_up(targets[0], target_info())
    assert [replica.usable for replica in (*targets, draft)] == [True, False, True]
    router.down(draft, "test")
    assert router.pick_draft("s") is None
    assert "d is down: test" in caplog.text


async def test_local_backends():
    router = await Router.local(FakeTarget(), FakeDraft())
    assert router.ready
    assert router.pick_draft("s") is not None
    with pytest.raises(ModelNotSupported):
        await Router.local(FakeTarget(), FakeDraft(info=draft_info(tokenizer_fingerprint="other")))


@pytest.mark.parametrize(
    ("device", "width", "expected"),
    [
        ("cpu", 384, ("bfloat16", "")),
        ("cpu", 16384, ("int8", "map")),  # 2 x 16384 x 2 bytes x 2048 tokens are more than is kept of a session
        ("cpu", 0, ("int8", "map")),
        ("cuda", 384, ("int8", "map")),
    ],
)
async def test_states_stay_as_they_are_in_one_process_where_a_whole_context_of_them_is_kept(device, width, expected):
    head = draft_info(hidden_state_layers=(1, 3), hidden_state_dtype="int8", hidden_state_map="map")
    target = FakeTarget(info=target_info(device=device, max_model_len=2048))
    router = await Router.local(target, FakeDraft(info=head), state_width=width)
    spec = router.hidden_states_spec("s")
    assert (spec.layers, spec.dtype, spec.through) == ((1, 3), *expected)


def test_the_metric_of_kv_use_is_a_share_before_a_target_has_told_its_size():
    target = Replica("target", FakeTarget(), healthy=True)
    router = Router([target], [])
    for _ in range(3):
        target.note_session()
    collector = LoadCollector(router, num_running=lambda: 0, num_waiting=lambda: 0)
    values = {family.name: family.samples[0].value for family in collector.collect() if family.samples}
    assert target.kv_use == 3  # what picks the less used of two
    assert values["tandem_target_kv_use"] == values["vllm:kv_cache_usage_perc"] == 1


async def test_the_metrics_of_replicas_tell_which_are_up_and_who_waits_there():
    target, draft = FakeTarget(), FakeDraft()
    router = await Router.local(target, draft)
    router.targets.replicas[0].note_load(ServerLoad(open_sessions=3, waiting_sessions=2))

    def values():
        collector = LoadCollector(router, num_running=lambda: 5, num_waiting=lambda: 4)
        samples = [sample for family in collector.collect() for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    seen = values()
    assert seen["tandem_target_up", "local-target"] == seen["tandem_draft_up", "local-draft"] == 1
    states = {state: seen["tandem_target_sessions", "local-target", state] for state in ("open", "waiting")}
    assert states == {"open": 3, "waiting": 2}
    assert seen["tandem_requests_waiting",] == 4
    assert seen["vllm:num_requests_waiting",] == 6
    assert seen["vllm:num_requests_running",] == 3
    router.down(router.drafts.replicas[0], "test")
    seen = values()
    assert seen["tandem_draft_up", "local-draft"] == 0
    assert ("tandem_draft_busy_share", "local-draft") not in seen

"""Between a pass and the tokens the host waits for the GPU once: when it fetches them.

In place of a GPU there is the device "meta", whose tensors have a shape and no values. What depends on values fails
there by itself; what copies from the host is judged by how it does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draft_service.drafters.trees.tree_passes import TreeJob, draft_trees
from engine.batch import build_batch
from engine.chains import ChainJob, draft_chains
from engine.compaction import Kept, move_entries, moves_of
from engine.cuda import choice_kernels, choices
from engine.cuda.sync import HostWaits, NoSync
from engine.engine import Segment
from engine.hidden_states import PassStates, StateRows
from engine.kv_pool import KVPool
from engine.sampling import distribution
from engine.sampling.rows import Rows
from engine.sampling.sparse import pack
from engine.sampling.state import SamplingState
from engine.sampling.transfer import send
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.tree_shape import TreeShape
from specdec.types import SessionSpec
from target_service.step import ScheduledSequence, StepSession, run_step
from target_service.stop_criteria import StopCriteria
from target_service.verification.captured import GpuVerdicts
from target_service.verification.rounds import Round
from target_service.verification.tensor_verifier import verify_with_tensors
from target_service.verification.verifier import Verifier
from tests.engine.cuda.launches import Counted, Launches

META = torch.device("meta")
V = 200
PROMPT = list(range(1, 10))
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "presence_penalty": 0.5},
    {"top_k": 7, "logit_bias": {4: 1.0}, "min_tokens": 9, "stop_token_ids": (5, 6)},
    {"min_p": 0.1, "repetition_penalty": 1.2, "bad_token_ids": ((3,), (4, 5))},
    {"allowed_token_ids": tuple(range(50))},
]


class Watch(TorchFunctionMode):
    """Raises :class:`HostWaits` at what would wait for the GPU, except where tokens are fetched, which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_fetched = 0
        pinned: set[int] = set()
        self._pinned = pinned
        self._kept: list[Tensor] = []  # so that no other memory gets their address

        class Pinned(NoSync):
            def is_pinned(self, tensor: Tensor) -> bool:
                return tensor.untyped_storage().data_ptr() in pinned

        self._operations = Pinned("meta")

    def __enter__(self) -> Watch:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory or kwargs.pop("pin_memory", False):
            self._kept.append(args[0].clone() if func is Tensor.pin_memory else func(*args, **kwargs))
            self._pinned.add(self._kept[-1].untyped_storage().data_ptr())
            return self._kept[-1]
        if func in {Tensor.tolist, Tensor.cpu} and args[0].is_meta:
            self.num_fetched += 1
            # Rounds end at place 0, which all have, with token 0; and what is decided is valid: a half is true.
            return func(torch.full(args[0].shape, 0.5).to(args[0].dtype))
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            if kwargs.get("non_blocking") and args[0].untyped_storage().data_ptr() in self._pinned:
                return args[0]
            raise HostWaits("it copies from the device to pageable memory")
        # These come to the device as tensors before any operation is seen.
        if func is torch.tensor and "device" in kwargs and torch.device(kwargs["device"]) == META:
            raise HostWaits("torch.tensor copies from pageable memory")
        if func in {Tensor.__getitem__, Tensor.__setitem__} and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            puts_number = func is Tensor.__setitem__ and not isinstance(args[2], Tensor)
            if any(isinstance(part, list) or (isinstance(part, Tensor) and puts_number) for part in index):
                raise HostWaits("indices or the number put there come from pageable memory")
        return func(*args, **kwargs)


class Model:
    """Takes batches as an engine on a GPU does; its logits are shapes."""

    def __init__(self) -> None:
        self.pool = KVPool(400, 4)
        self.runner = SimpleNamespace(draft_chains=lambda jobs, stop: None, captured_chains=None)  # a pass per step

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        batch = build_batch(segments, block_size=4, vocab_size=V, max_model_len=64).to(META)
        assert batch.input_ids.device == batch.plan.slots.device == META
        for segment in segments:
            segment.sequence.length += len(segment.token_ids)
        return torch.empty(batch.logit_rows.shape[0], V, device=META)

    def copy_blocks(self) -> None:
        """No sequence was forked."""

    def keep_rows(self, kept: Sequence[Kept]) -> None:
        """The second of two siblings."""
        moves = moves_of([replace(one, rows=(0, 2)) for one in kept], 4)
        move_entries([torch.empty(401, 2, 4, 8, device=META)], moves)


def every_state() -> list[tuple[SamplingState, Rule]]:
    kinds = [(SamplingParams(seed=seed, **params), rule) for seed, params in enumerate(SAMPLING) for rule in Rule]
    return [(SamplingState(params, PROMPT, len(PROMPT), V, device=META), rule) for params, rule in kinds]


def on_gpu(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> GpuVerdicts:
    """Kernels that are counted alone, and graphs that are the captured function, run again and not counted."""

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        def replay() -> None:
            before = launches.counts.copy()
            run()
            launches.counts = before + Counter(["replay"])

        return replay

    for name in ("choose", "walk", "forbid", "weigh"):
        monkeypatch.setattr(choice_kernels, name, Counted(name, launches))
    return GpuVerdicts(choices, capture, META)


@pytest.mark.parametrize("parents", [(), (-1, -1)])
@pytest.mark.parametrize(("has_q", "is_captured"), [(False, True), (True, True), (True, False)])
def test_a_step_waits_once(
    has_q: bool, is_captured: bool, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "NUM_CANDIDATES", 20)
    verifier = Verifier()
    verifier.on_gpu = on_gpu(Launches(), monkeypatch) if is_captured else None
    model = Model()
    q_rows = tuple(pack(np.array(ids), np.array([2, 1])) for ids in ([3, 7], [5, 6])) if has_q else ()
    criteria = StopCriteria(len(PROMPT), 40, frozenset(), 0)
    sessions = []
    for i, (state, rule) in enumerate(every_state()):
        params = replace(state.params, logprobs=2 if i % 2 else None)
        spec = SessionSpec(session_id=str(i), token_ids=tuple(PROMPT), prompt_len=len(PROMPT), params=params)
        sessions.append(StepSession(spec, state, model.pool.open(40), rule, criteria))
    for _ in range(3):  # a prompt, and rounds before and after the tensors of its parameters are made
        parts = []
        for i, session in enumerate(sessions):
            fed = session.state.token_ids[session.sequence.length :]
            drafts = (3, 5) if len(fed) == 1 else ()
            q = q_rows if drafts and session.rule is not Rule.COUPLED and i % 3 else ()
            q = q[:1] if parents else q  # siblings share one; they are 3 and 7
            drafts, follows = (3, 7) if parents and drafts else drafts, parents if drafts else ()
            parts.append(
                ScheduledSequence(session, [*fed, *drafts], True, drafts, q, is_prefill=not drafts, parents=follows)
            )
        with Watch() as watch:
            result = run_step(model, verifier, parts)
        assert watch.num_fetched == 1
        assert [part.error for part in result.parts] == [None] * len(parts)
        for session in sessions:
            model.pool.rollback(session.sequence, len(session.state) - 1)


REPLAY = {"copy_": 1, "index_select": 1, "replay": 1, "clone": 1}
TREE = (-1, -1, 0, 0)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        (Rule.BLOCK, {"temperature": 0.0}, 28, {"_to_copy": 1, "choose": 1, "walk": 1}),
        (Rule.COUPLED, {}, 63, {"_to_copy": 1, "choose": 1, "walk": 1}),
        (Rule.COUPLED, {"top_p": 0.9}, 103, REPLAY),
        (Rule.TOKEN, {"top_p": 0.9}, 121, REPLAY),
        (Rule.BLOCK, {"top_p": 0.9}, 155, REPLAY),
        (Rule.BLOCK, {"top_p": 0.9, "parents": TREE}, 221, REPLAY),
    ],
)
def test_launches_of_a_verdict(
    case: tuple[Rule, dict[str, Any], int, dict[str, int]], is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four drafts of each of eight sessions, at a vocabulary of 128,256, before its copy to the host."""
    num_tokens, row = 128_256, pack(np.array([3, 5, 7, 8]), np.array([1, 2, 3, 4]))
    rule, given, before, after = case
    params = given.copy()
    parents = params.pop("parents", ())
    masks = torch.full((5, num_tokens // 32), -1, dtype=torch.int32) if is_masked else None
    states = [SamplingState(SamplingParams(seed=i, **params), PROMPT, 9, num_tokens, device=META) for i in range(8)]
    q_rows = (row,) * (2 if parents else 4) if rule is not Rule.COUPLED else ()
    rounds = [
        Round(state, rule, 5 * i, (3, 5, 7, 8), q_rows, parents=parents, masks=masks) for i, state in enumerate(states)
    ]
    logits, launches = torch.empty(40, num_tokens, device=META), Launches("meta")
    gpu, found = on_gpu(launches, monkeypatch), []
    for way in (None, gpu, gpu):  # the second captures
        with Watch() as watch, launches:
            launches.counts.clear()
            verify_with_tensors(logits, rounds, on_gpu=way)
        assert watch.num_fetched == 1
        found.append(launches.counts.copy())
    if not is_masked:
        assert before <= found[0].total() <= before + 1
        assert found[2] == after
        return
    assert before + 4 <= found[0].total() <= before + 5
    sent = {"_to_copy": after.get("_to_copy", 0) + (2 if after is REPLAY else 1)}
    assert found[2] == {**after, **sent, **({"forbid": 1} if after is REPLAY else {})}


def test_a_draft_waits_once() -> None:
    model: Any = Model()
    jobs = [
        ChainJob(model.pool.open(30), PROMPT, 1 + i % 4, state, rule) for i, (state, rule) in enumerate(every_state())
    ]
    with Watch() as watch:
        chains = draft_chains(model, jobs)
    assert watch.num_fetched == 1
    assert [len(chain.token_ids) for chain in chains] == [job.num_tokens for job in jobs]


def test_a_drafted_tree_waits_once_a_level() -> None:
    """Which tokens have children is decided on the host."""
    model: Any = Model()
    jobs = [
        TreeJob(model.pool.open(30), PROMPT, TreeShape(top_k=2, depth=3), 12, state, rule)
        for state, rule in every_state()
    ]
    with Watch() as watch:
        trees = draft_trees(model, jobs, lambda: [False] * len(jobs))
    assert watch.num_fetched == 3
    assert all(tree.token_ids for tree in trees)


def test_hidden_states_are_fetched_while_the_device_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event stands for one of CUDA's: the host waits for it alone, at the first use."""
    calls: list[str] = []
    event = SimpleNamespace(record=lambda: calls.append("record"), synchronize=lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    sequence = KVPool(4, 4).open(4)
    wanted = StateRows([Segment(sequence, [1, 2, 3], 1, 2, (0, 1))])
    with Watch() as watch:
        states = PassStates(wanted, torch.empty(2, 2, 8, dtype=torch.bfloat16, device=META))
        states.fetch(0, "", None)
        assert calls == ["record"]
        for _ in range(2):
            assert states.of(0).shape == (2, 16)
            assert len(states.rows(0, range(1), 0).data) == 32
    assert calls == ["record", "synchronize"]
    assert watch.num_fetched == 0
    with pytest.raises(HostWaits, match="pageable memory"), Watch():
        torch.empty(3).copy_(torch.empty(3, device=META), non_blocking=True)


HERE = torch.arange(3)
THERE = torch.empty(5, device=META)
AT = torch.empty(2, dtype=torch.int64, device=META)
WAITS: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.tensor([1, 2], device=META),
    "to": lambda: HERE.to(META),
    "pageable": lambda: HERE.to(META, non_blocking=True),
    "list": lambda: THERE[[0, 1]],
    "indices": lambda: THERE[HERE],
    "number": lambda: THERE.__setitem__(AT, 1.0),
    "mask": lambda: THERE[THERE > 1],
    "item": lambda: int(THERE[0]),
    "if": lambda: bool(THERE.any()),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_not_missed(name: str) -> None:
    with Watch(), pytest.raises((HostWaits, NotImplementedError, RuntimeError)):
        WAITS[name]()


def test_what_is_sent_is_not_waited_for() -> None:
    with Watch() as watch:
        assert send([[1, 2], [3, 4]], META).shape == (2, 2)
        assert Rows.along([s for s, _ in every_state()[:2]], [(1,), ()]).prefix.device == META
    assert watch.num_fetched == 0
    assert send([1, 2], torch.device("cpu"), torch.float64).tolist() == [1.0, 2.0]

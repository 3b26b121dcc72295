"""Which replica serves a session: rendezvous hashing over the healthy ones."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Self, TypeVar

from gateway.placement.prefix_routes import PrefixRoutes
from gateway.placement.state_map_carrier import StateMapCarrier
from specdec.backends import DraftBackend, TargetBackend
from specdec.errors import ModelNotSupported, Unavailable
from specdec.hidden_state_buffer import MAX_BYTES
from specdec.state_dtypes import ELEMENT_BYTES
from specdec.types import ModelInfo, ServerLoad, SessionSpec
from specdec.vocabulary import check_compatible

logger = logging.getLogger(__name__)

B = TypeVar("B", TargetBackend, DraftBackend)

#: Seconds a replica that just failed a session is passed over while others are there.
AVOID_S: Final = 1.0
#: Share of the KV cache by which a target that has the beginning of a prompt may be fuller than the emptiest one.
MAX_EXCESS_USE: Final = 0.25


@dataclass(frozen=True, slots=True)
class HiddenStateSpec:
    """Hidden states of the target that a draft reads: of which layers, whether the newest position's are enough, and in
    which type they should come.
    """

    layers: tuple[int, ...] = ()
    last_only: bool = False
    dtype: str = ""
    #: Fingerprint of what the target does with them, if it can; empty: nothing.
    through: str = ""

    @classmethod
    def of(cls, info: ModelInfo) -> HiddenStateSpec:
        """What a draft says it reads."""
        if not info.hidden_state_layers:
            return cls()
        return cls(
            info.hidden_state_layers, info.last_hidden_state_only, info.hidden_state_dtype, info.hidden_state_map
        )

    def asked_in(self, spec: SessionSpec) -> SessionSpec:
        """A session of the target whose verdicts carry them."""
        return replace(
            spec,
            hidden_state_layers=self.layers,
            last_hidden_state_only=self.last_only,
            hidden_state_dtype=self.dtype,
            hidden_state_map=self.through,
        )


class Replica(Generic[B]):
    """One server: its backend, what it serves, and whether it can be used."""

    def __init__(self, name: str, backend: B, *, info: ModelInfo | None = None, healthy: bool = True) -> None:
        self.name = name
        self.backend: B = backend
        #: What the server said when it last came up; None before that.
        self.info = info
        self.healthy = healthy
        #: Why the replica must never be used (an incompatible vocabulary); None when it may.
        self.refusal: str | None = None
        #: Why it is not healthy, as far as that is known.
        self.problem = "it has not answered yet"
        self._avoid_until = 0.0
        self._load = ServerLoad()
        self._load_told_s = 0.0
        #: Share of the time between the last two times it told its load that it computed what sessions wait for.
        self.busy_share = 0.0
        #: Sessions sent there since it told its load.
        self._num_sent = 0

    @property
    def usable(self) -> bool:
        """Healthy and fitting."""
        return self.healthy and self.refusal is None

    @property
    def reason(self) -> str:
        """Why it cannot be used; empty where it can."""
        return self.refusal or ("" if self.healthy else self.problem)

    @property
    def avoided(self) -> bool:
        """Whether it failed a session a moment ago."""
        return time.monotonic() < self._avoid_until

    @property
    def load(self) -> ServerLoad:
        """How full it said it is last."""
        return self._load

    @property
    def kv_use(self) -> float:
        """Share of its KV cache that open sessions use: as it said last, and those sent there since, each counted as
        large as the others. Above 1 where more are sent there than it has told of.
        """
        load = self._load
        size = max(1.0, load.used_blocks / max(load.open_sessions, 1))
        return (load.used_blocks + self._num_sent * size) / max(load.total_blocks, 1)

    def note_load(self, load: ServerLoad) -> None:
        """It told its load."""
        now_s, before = time.monotonic(), self._load
        spent_ns = load.busy_ns - before.busy_ns
        elapsed_s = now_s - self._load_told_s
        if self._load_told_s and spent_ns >= 0 and elapsed_s > 0:  # less: it was restarted
            self.busy_share = min(1.0, spent_ns / 1e9 / elapsed_s)
        self._load, self._load_told_s, self._num_sent = load, now_s, 0

    def note_session(self) -> None:
        """A session is sent there."""
        self._num_sent += 1

    def avoid(self) -> None:
        """Prefer other replicas for a moment."""
        self._avoid_until = time.monotonic() + AVOID_S


def rank(session_id: str, name: str) -> bytes:
    """Weight of a replica for a session (highest wins): adding or losing a replica moves only that replica's share."""
    return hashlib.blake2b(f"{session_id}\0{name}".encode(), digest_size=8).digest()


class Pool(Generic[B]):
    """Replicas of one role."""

    def __init__(self, replicas: Iterable[Replica[B]] = ()) -> None:
        self.replicas: list[Replica[B]] = list(replicas)

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def usable(self) -> list[Replica[B]]:
        """The replicas that can be used now."""
        return [replica for replica in self.replicas if replica.usable]

    def pick(self, session_id: str, avoid: Collection[Replica[B]] = (), *, is_bound: bool = True) -> Replica[B] | None:
        """The session's replica; those in ``avoid`` and those that just failed only when there is no other.

        A session that is not bound to one goes to the less used of its first two (the power of two choices,
        Mitzenmacher 2001). None when no replica can be used.
        """
        usable = self.usable
        if len(usable) > 1:
            fresh = [replica for replica in usable if replica not in avoid]
            calm = [replica for replica in fresh if not replica.avoided]
            usable = calm or fresh or usable
        if len(usable) <= 1:
            return usable[0] if usable else None
        first = heapq.nlargest(1 if is_bound else 2, usable, key=lambda replica: rank(session_id, replica.name))
        return min(first, key=lambda replica: replica.kv_use)


class Router:
    """The targets and drafts of one gateway, all serving one model."""

    def __init__(
        self, targets: Sequence[Replica[TargetBackend]] = (), drafts: Sequence[Replica[DraftBackend]] = ()
    ) -> None:
        self.targets: Pool[TargetBackend] = Pool(targets)
        self.drafts: Pool[DraftBackend] = Pool(drafts)
        self._model: ModelInfo | None = None
        #: Methods that drafts said they have since the start; a set in order.
        self._draft_methods: dict[str, None] = {}
        self._target_came_up = asyncio.Event()
        self._prefixes = PrefixRoutes()
        self._carrier = StateMapCarrier()

    @classmethod
    async def local(cls, target: TargetBackend, draft: DraftBackend | None = None, *, state_width: int = 0) -> Self:
        """A router over backends in this process.

        ``state_width``: numbers of one of the target's hidden states, 0 for unknown. On a CPU the states stay as they
        are where those of a whole context can be kept: rounding and mapping save bytes alone, and took a quarter of a
        plain token's time where the target has 12 M parameters.

        Raises:
            ModelNotSupported: the draft's vocabulary is not the target's.
        """
        router = cls(
            [Replica("local-target", target, healthy=False)],
            [] if draft is None else [Replica("local-draft", draft, healthy=False)],
        )
        router.target_up(router.targets.replicas[0], await target.info())
        if draft is not None:
            info = await draft.info()
            model = router.model()
            check_compatible(model, info)
            row_bytes = len(info.hidden_state_layers) * state_width * ELEMENT_BYTES["bfloat16"]
            if model.device == "cpu" and 0 < row_bytes <= MAX_BYTES // max(model.max_model_len, 1):
                info = replace(info, hidden_state_dtype="bfloat16", hidden_state_map="")
            router.draft_up(router.drafts.replicas[0], info)
        return router

    @property
    def ready(self) -> bool:
        """Whether a target can be used."""
        return any(replica.usable for replica in self.targets.replicas)

    async def wait_ready(self) -> None:
        """Return once a target can be used."""
        while not self.ready:
            self._target_came_up.clear()
            await self._target_came_up.wait()

    def model(self) -> ModelInfo:
        """The model served, as the first target to come up described it.

        Raises:
            Unavailable: no target has answered yet.
        """
        if self._model is None:
            raise Unavailable("no target service has answered yet; try again once one is up")
        return self._model

    def draft_model(self) -> ModelInfo | None:
        """The draft in use; None while there is none."""
        return next((replica.info for replica in self.drafts.usable), None)

    @property
    def draft_methods(self) -> tuple[str, ...]:
        """The methods of the drafts, those included that are lost or have left, and may come back."""
        known = [(replica.info.method, replica.refusal) for replica in self.drafts.replicas if replica.info]
        fitting = {method for method, refusal in known if refusal is None}
        refused = {method for method, refusal in known if refusal is not None} - fitting
        return tuple(method for method in self._draft_methods if method not in refused)

    def target_up(self, replica: Replica[TargetBackend], info: ModelInfo) -> None:
        """A target came up. One whose tokens differ from the model served by others is refused; without others, its
        model is the one served from now on.
        """
        replica.info = info
        replica.healthy = True
        if self._model is None or not any(other.usable for other in self.targets.replicas if other is not replica):
            self._model = info
            for target in self.targets.replicas:
                self._judge(target)
            for draft in self.drafts.replicas:
                self._judge(draft)
        else:
            self._judge(replica)
        self._target_came_up.set()
        if replica.refusal is None:
            logger.info("target %s is up: %s", replica.name, info.name)

    def draft_up(self, replica: Replica[DraftBackend], info: ModelInfo) -> None:
        """A draft came up. One whose tokens differ from the target's is refused."""
        replica.info = info
        self._judge(replica)
        replica.healthy = True
        self._draft_methods[info.method] = None
        if replica.refusal is None:
            logger.info("draft %s is up: %s %s", replica.name, info.method, info.name)

    def down(self, replica: Replica[TargetBackend] | Replica[DraftBackend], why: str) -> None:
        """A replica cannot be used for now."""
        if replica.healthy:
            logger.warning("%s is down: %s", replica.name, why)
        replica.healthy, replica.problem = False, why

    def pick_target(
        self,
        session_id: str,
        avoid: Collection[Replica[TargetBackend]] = (),
        *,
        is_bound: bool = True,
        prefixes: Sequence[bytes] = (),
    ) -> Replica[TargetBackend]:
        """The target of a session that is sent there now; ``is_bound``: see :meth:`Pool.pick`.

        One that is not bound goes to the target that has most of its prompt (``prefixes``: the hashes of that), unless
        it is much fuller than another. With 8 clients that each continue a chat of their own on two targets, 0.97 of
        what could be reused is reused, and 0.5 without.

        Raises:
            Unavailable: no target can be used.
        """
        replica = None if is_bound else self._with_prefix(prefixes, avoid)
        replica = replica or self.targets.pick(session_id, avoid, is_bound=is_bound)
        if replica is None:
            raise Unavailable(f"none of the {len(self.targets)} target services can be used now; try again later")
        replica.note_session()
        self._prefixes.note(prefixes, replica.name)
        return replica

    def pick_draft(self, session_id: str, method: str = "") -> Replica[DraftBackend] | None:
        """The session's draft, of this method unless that is empty; None when none can be used now."""
        return self._drafts_of(method).pick(session_id)

    def hidden_states_spec(self, session_id: str, method: str = "") -> HiddenStateSpec:
        """The hidden states that the session's draft reads; while no draft can be used, those that one reads which may
        come back. ``method``: see :meth:`pick_draft`.
        """
        replica = self.pick_draft(session_id, method)
        infos = [other.info for other in ([replica] if replica is not None else self._drafts_of(method).replicas)]
        return next((HiddenStateSpec.of(info) for info in infos if info is not None), HiddenStateSpec())

    def carry_state_map(self, target: Replica[TargetBackend], spec: SessionSpec) -> None:
        """A target lacks the map of a session, and would take it: begin to bring it there."""
        for draft in self.drafts.usable:
            if draft.info is not None and draft.info.hidden_state_map == spec.hidden_state_map:
                self._carrier.carry(target.name, target.backend, draft.backend, spec)
                return

    def _with_prefix(
        self, prefixes: Sequence[bytes], avoid: Collection[Replica[TargetBackend]]
    ) -> Replica[TargetBackend] | None:
        name, usable = self._prefixes.find(prefixes), self.targets.usable
        found = next((each for each in usable if each.name == name and each not in avoid and not each.avoided), None)
        if found is None or found.kv_use > MAX_EXCESS_USE + min(each.kv_use for each in usable):
            return None
        return found

    def _drafts_of(self, method: str) -> Pool[DraftBackend]:
        """The drafts of one method; of any where it is empty."""
        if not method:
            return self.drafts
        return Pool(replica for replica in self.drafts.replicas if replica.info and replica.info.method == method)

    def _judge(self, replica: Replica[TargetBackend] | Replica[DraftBackend]) -> None:
        replica.refusal = None
        if self._model is None or replica.info is None:
            return
        try:
            check_compatible(self._model, replica.info)
        except ModelNotSupported as error:
            replica.refusal = str(error)
            logger.error("%s will not be used: %s", replica.name, error)

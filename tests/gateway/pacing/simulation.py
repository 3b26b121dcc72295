"""A target, a draft and a gateway's sessions as a simulation: the true costs are known, so regret can be measured."""

from __future__ import annotations

import heapq
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from gateway.pacing.pace import Pace, Pacer
from gateway.pacing.target_pacer import TargetPacer
from specdec.types import RoundTimings, Verdict
from target_service.scheduler.round_coalescer import RoundCoalescer
from target_service.session.throughput import GroupThroughput, Throughput

MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class World:
    """The truth: times in milliseconds."""

    #: Of a step, by rows and sessions.
    step: Callable[[float, float], float]
    #: Acceptance rate of every drafted token, by time in seconds and the number of the session.
    acceptance: Callable[[float, int], float]
    #: Clients at a time, each always with one request open, by time in seconds.
    load: Callable[[float], int] = lambda _: 1
    #: A drafted token; a token of a prompt or one that the draft has missed.
    draft: float = 0.3
    catch_up: float = 0.03
    #: Gateway to target, target to gateway, and the same to the draft.
    network: float = 0.15
    #: Work of the gateway for a round and for a token decoded in multi-step; one thing at a time.
    round_work: float = 0.15
    plain_work: float = 0.05
    #: Share of the rounds whose proposal arrived before the verdict.
    hits: float = 0.0
    #: Whether drafting takes its time from the target's (one machine).
    shared: bool = False
    noise: float = 0.05
    #: One step in so many takes ten times as long.
    outlier_every: int = 400
    tokens: int = 128
    prompt: int = 32
    k: int = 4
    #: Levels of the trees the draft proposes, ``acceptance`` being that of a level; None: it proposes chains.
    depth: int | None = None


#: What decides k: the pace of a session, its remaining tokens and the time in ns.
Policy = Callable[[Pace, int, int], int]


def adaptive(pace: Pace, remaining: int, now_ns: int) -> int:
    return pace.num_draft_tokens(remaining, now_ns)


def fixed(k: int) -> Policy:
    return lambda pace, remaining, now_ns: min(k, remaining - 1)


def plain(pace: Pace, remaining: int, now_ns: int) -> int:
    """Everything is asked for at once."""
    return 0


@dataclass(eq=False)
class Client:
    number: int
    pace: Pace
    remaining: int
    #: That of its gateway; what the others had when it was opened; and when its tokens were committed last.
    throughput: GroupThroughput
    others_from: tuple[int, int]
    committed_at: float | None = None
    k: int = 0
    #: Tokens that the target still decodes by itself.
    multi_step: int = 0
    #: When the draft session is open; None: not asked for.
    open_at: float | None = None
    unseen: int = 0
    asked_at: float = 0.0
    closed: bool = False


@dataclass
class Simulation:
    world: World
    policy: Policy
    seed: int = 0
    pacer: Pacer = field(default_factory=TargetPacer)
    #: Those of other gateways; clients go to all in turn.
    other_pacers: tuple[Pacer, ...] = ()
    now: float = 0.0
    #: (second, tokens) of every verdict.
    log: list[tuple[float, int]] = field(default_factory=list)
    ks: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.coalescer = RoundCoalescer()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.ready: list[Client] = []
        self.running = False
        self.gateway_free = 0.0
        self.stolen = 0.0
        self.throughput = Throughput()
        self.clients: list[Client] = []
        self.numbers = count()
        self.num_steps = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def run(self, seconds: float) -> float:
        """Simulate so many more seconds; tokens per second in them."""
        begin, end = self.now, self.now + 1000.0 * seconds
        first = len(self.log)
        self.at(self.now, self.watch)
        while self.events and self.events[0][0] <= end:
            self.now, _, what = heapq.heappop(self.events)
            what()
        self.now = end
        return sum(tokens for _, tokens in self.log[first:]) / (end - begin) * 1000.0

    def watch(self) -> None:
        wanted = self.world.load(self.now / 1000.0)
        while len(self.clients) < wanted:
            self.clients.append(self.open())
        while len(self.clients) > wanted:
            self.close(self.clients.pop())
        self.at(self.now + 20.0, self.watch)

    def open(self) -> Client:
        world = self.world
        tokens = self.random.randint(world.tokens // 2, world.tokens * 3 // 2)
        number, pacers = next(self.numbers), (self.pacer, *self.other_pacers)
        pace = pacers[number % len(pacers)].session(world.k)
        throughput = self.throughput.of_group(pace.group)
        client = Client(number, pace, tokens, throughput, throughput.others)
        client.unseen = world.prompt
        self.at(self.now + world.network, lambda: self.start_next(client))
        return client

    def close(self, client: Client) -> None:
        client.closed = True
        self.coalescer.forget(client)
        client.pace.leave()
        if client in self.ready:
            self.ready.remove(client)

    def work(self, cost: float) -> float:
        """The time at which the gateway, one thread, is done with this."""
        self.gateway_free = max(self.gateway_free, self.now) + cost
        return self.gateway_free

    def start_next(self, client: Client) -> None:
        """Let the gateway decide what comes next."""
        if client.closed:
            return
        world = self.world
        k = self.policy(client.pace, client.remaining, int(self.now * MS))
        self.ks.append((self.now / 1000.0, k))
        if k and client.open_at is None:
            self.open_draft(client)
        client.k = k
        if k and client.open_at is not None and client.open_at <= self.now:
            hit = client.unseen == 0 and self.random.random() < world.hits
            draft = k * world.draft + client.unseen * world.catch_up
            self.stolen += draft
            client.unseen = 0
            wait = 0.0 if hit else draft + 3 * world.network
            done = self.work(world.round_work) + wait
            self.at(done, lambda: self.arrive(client))
            return
        client.k, client.multi_step = 0, client.remaining
        self.at(self.work(world.plain_work) + world.network, lambda: self.arrive(client))

    def end_multi_step(self, client: Client) -> None:
        client.multi_step = min(client.multi_step, 1)

    def open_draft(self, client: Client) -> None:
        world = self.world
        client.open_at = self.now + 2 * world.network + client.unseen * world.catch_up
        self.stolen += client.unseen * world.catch_up
        client.unseen = 0

    def arrive(self, client: Client) -> None:
        if not client.closed:
            client.asked_at = self.now
            self.coalescer.came(client, int(self.now * MS))
            self.ready.append(client)
            self.step()

    def step(self) -> None:
        if self.running or not self.ready:
            return
        now_ns = int(self.now * MS)
        until_ns = self.coalescer.wait_until(now_ns, has_others=not all(client.k for client in self.ready))
        if until_ns > now_ns:
            self.at((until_ns + 1000) / MS, self.step)
            return
        self.running = True
        self.coalescer.step_begins()
        batch, self.ready = self.ready, []
        rows = sum(client.k + 1 for client in batch)
        self.num_steps += 1
        cost = self.world.step(rows, len(batch)) * self.random.lognormvariate(0.0, self.world.noise)
        if self.num_steps % self.world.outlier_every == 0:
            cost *= 10.0
        if self.world.shared:
            cost, self.stolen = cost + self.stolen, 0.0
        timings = RoundTimings(
            forward_ns=int(cost * 0.9 * MS),
            verify_ns=int(cost * 0.1 * MS),
            batch_sessions=len(batch),
            batch_rows=rows,
            batch_context=100 * len(batch),
        )
        begun = self.now
        self.at(self.now + cost, lambda: self.finish_step(batch, timings, begun))

    def finish_step(self, batch: list[Client], timings: RoundTimings, begun: float) -> None:
        self.running = False
        num_rounds, num_left = sum(client.k > 0 for client in batch), sum(client.remaining for client in batch)
        for client in batch:
            if not client.closed:
                self.commit(client, timings, begun)
        num_tokens = num_left - sum(client.remaining for client in batch)
        self.coalescer.step_ended(num_rounds, num_tokens, int(self.now * MS), timings.forward_ns + timings.verify_ns)
        self.at(self.now + 0.05, self.step)

    def commit(self, client: Client, timings: RoundTimings, begun: float) -> None:
        rate = self.world.acceptance(self.now / 1000.0, client.number)
        accepted = 0
        most = client.k if self.world.depth is None else min(client.k, self.world.depth)
        while accepted < most and self.random.random() < rate:
            accepted += 1
        tokens = min(accepted + 1, client.remaining)
        client.remaining -= tokens
        if client.committed_at is not None:
            client.throughput.add(tokens, int((self.now - client.committed_at) * MS))
        client.committed_at = self.now
        others_tokens, others_ns = map(operator.sub, client.throughput.others, client.others_from)
        queue_ns = max(int((begun - client.asked_at) * MS), 0)
        timings = replace(timings, queue_ns=queue_ns, others_tokens=others_tokens, others_ns=others_ns)
        verdict = Verdict(1, 1, (1,) * tokens, accepted, client.k, timings=timings)
        asked, continues = client.k, False
        if asked and client.remaining:
            self.coalescer.left(client, int(self.now * MS))
        if not asked:
            client.multi_step -= 1
            client.unseen += 1
            continues = client.multi_step > 0 and client.remaining > 0
        if continues:
            client.asked_at = self.now
            self.ready.append(client)
        done = max(self.work(self.world.plain_work), self.now) + self.world.network
        self.at(done, lambda: self.ingest(client, verdict, asked, continues))

    def ingest(self, client: Client, verdict: Verdict, asked: int, continues: bool) -> None:
        if client.closed:
            return
        self.log.append((self.now / 1000.0, len(verdict.token_ids)))
        tree_depth = None if self.world.depth is None or not asked else min(asked, self.world.depth)
        client.pace.record(verdict, asked, int(self.now * MS), tree_depth=tree_depth)
        if continues:
            k = self.policy(client.pace, client.remaining, int(self.now * MS))
            self.ks.append((self.now / 1000.0, k))
            if k and client.open_at is None:
                self.open_draft(client)
            elif k and client.open_at is not None and client.open_at <= self.now:
                self.at(self.work(0.0) + self.world.network, lambda: self.end_multi_step(client))
            return
        if client.remaining > 0:
            self.start_next(client)
            return
        self.close(client)
        self.clients[self.clients.index(client)] = self.open()

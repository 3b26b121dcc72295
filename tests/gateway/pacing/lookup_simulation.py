"""A target that decodes in multi-step and a gateway that looks up, as a simulation: the true costs are known."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from gateway.pacing.lookup_pacer import LookupPace, LookupPacer
from specdec.lookup.base import Match
from specdec.types import RoundTimings

MS = 1_000_000
#: Tokens that are found each time, and what a wrong one is.
FOUND, WRONG = 32, -1


@dataclass(frozen=True, kw_only=True)
class World:
    """The truth: times in milliseconds."""

    #: Of a step, by rows.
    step: Callable[[float], float]
    sessions: int = 1
    #: From the gateway to the target, and back.
    network: float = 0.15
    #: Work of the gateway, one thing at a time: a verdict, a lookup, a round.
    verdict: float = 0.02
    lookup: float = 0.02
    round: float = 0.15
    #: Acceptance rate of what short matches find.
    acceptance: float = 0.1
    #: Share of the tokens that belong to copies, which long matches find, and how long these are.
    copied: float = 0.0
    copy: int = 40
    noise: float = 0.05
    #: How many times slower the target is, by time in milliseconds.
    slowness: Callable[[float], float] = lambda _: 1.0
    tokens: int = 128


@dataclass(eq=False)
class Client:
    pace: LookupPace | None
    #: Of each token of the text: how many tokens from it on a match gets right, and how long the match is.
    matches: list[tuple[int, int]]
    #: Tokens that the target has committed, and the gateway has.
    at_target: int = 0
    at_gateway: int = 0
    #: A round on its way or at the target: where it begins and how many of its tokens are drafted.
    round: tuple[int, int] | None = None
    arrived: bool = False
    decodes: bool = True


@dataclass
class Simulation:
    world: World
    is_plain: bool = False
    seed: int = 0
    now: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pacer = LookupPacer()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.is_running = False
        self.gateway_free = 0.0
        self.clients = [self.open() for _ in range(self.world.sessions)]
        self.at(0.0, self.step)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def run(self, seconds: float) -> float:
        """Simulate so many more seconds; tokens per second in them."""
        end, before = self.now + 1000.0 * seconds, self.num_tokens
        while self.events[0][0] <= end:
            self.now, _, what = heapq.heappop(self.events)
            what()
        self.now = end
        return (self.num_tokens - before) / seconds

    def open(self) -> Client:
        world, matches = self.world, []
        while len(matches) < world.tokens:
            if self.random.random() < world.copied / world.copy / (1.0 - world.copied + 1e-9):
                matches += [(world.copy - i, min(4 + i, 63)) for i in range(world.copy)]
                continue
            num_right = 0
            while self.random.random() < world.acceptance:
                num_right += 1
            matches.append((num_right, self.random.randint(1, 3)))
        return Client(None if self.is_plain else LookupPace(self.pacer, ("ngram",)), matches[: world.tokens])

    def step(self) -> None:
        batch = [client for client in self.clients if client.decodes or client.arrived]
        if self.is_running or not batch:
            return
        self.is_running, drafted, begins = True, [], []
        for client in batch:
            begin, num_tokens = client.round if client.arrived and client.round else (0, 0)
            begins.append(begin)
            drafted.append(max(0, min(begin + num_tokens, self.world.tokens - 1) - client.at_target))
            if client.arrived:
                client.arrived = client.decodes = False
        rows = len(batch) + sum(drafted)
        ms = self.world.step(rows) * self.world.slowness(self.now) * self.random.lognormvariate(0.0, self.world.noise)
        timings = RoundTimings(forward_ns=int(ms * MS), batch_sessions=len(batch), batch_rows=rows)
        self.at(self.now + ms, lambda: self.end_step(batch, begins, drafted, timings))

    def end_step(self, batch: list[Client], begins: list[int], drafted: list[int], timings: RoundTimings) -> None:
        self.is_running = False
        for client, begin, num_drafted in zip(batch, begins, drafted, strict=True):
            right = begin + client.matches[begin][0] - client.at_target if num_drafted else 0
            num_tokens = min(1 + max(0, min(right, num_drafted)), self.world.tokens - client.at_target)
            client.at_target += num_tokens
            if client.at_target >= self.world.tokens:
                client.decodes = client.arrived = False
            self.at(
                self.now + self.world.network,
                lambda client=client, num_tokens=num_tokens, is_round=num_drafted > 0: self.receive(
                    client, num_tokens, timings, is_round=is_round
                ),
            )
        self.step()

    def receive(self, client: Client, num_tokens: int, timings: RoundTimings, *, is_round: bool) -> None:
        """The gateway reads a verdict once it is done with those before."""
        self.gateway_free = max(self.gateway_free, self.now) + self.world.verdict
        self.at(self.gateway_free, lambda: self.ingest(client, num_tokens, timings, is_round=is_round))

    def ingest(self, client: Client, num_tokens: int, timings: RoundTimings, *, is_round: bool) -> None:
        self.num_tokens += num_tokens
        tokens = range(client.at_gateway, client.at_gateway + num_tokens)
        client.at_gateway += num_tokens
        if client.at_gateway >= self.world.tokens:
            if client.pace is not None:
                client.pace.leave()
            self.clients[self.clients.index(client)] = self.open()
            self.at(self.now + self.world.network, self.step)
            return
        if client.round is not None:
            first, drafted = client.round
            right = client.matches[first][0]
            if is_round or client.at_gateway >= first + min(drafted, right):
                client.round = None
        if client.pace is None:
            return
        client.pace.record(tokens, timings, int(self.now * MS))
        if client.round is None and self.look_up(client):
            return
        if not client.decodes and client.round is None:  # the target waited for this session
            self.at(self.gateway_free + self.world.network, lambda: self.resume(client))

    def look_up(self, client: Client) -> bool:
        assert client.pace is not None
        if not client.pace.looks_up():
            return False
        self.gateway_free = max(self.gateway_free, self.now) + self.world.lookup
        first = client.at_gateway
        num_right, length = client.matches[first]
        found = [first + i if i < num_right else WRONG for i in range(min(FOUND, self.world.tokens - first - 1))]
        if not found:
            return False
        num_tokens = client.pace.num_draft_tokens(Match(tuple(found), length), 1.0)
        if not num_tokens:
            return False
        self.num_rounds += 1
        self.gateway_free += self.world.round
        client.round = first, num_tokens
        self.at(self.gateway_free + self.world.network, lambda: self.arrive(client))
        return True

    def resume(self, client: Client) -> None:
        client.decodes = client.at_target < self.world.tokens
        self.step()

    def arrive(self, client: Client) -> None:
        """A round reaches the target: it takes the place of the next token, unless another text was decoded."""
        if client.round is None or client.at_target >= self.world.tokens:
            return
        first, _ = client.round
        if client.at_target - first <= client.matches[first][0]:
            client.arrived = True
            self.step()
        elif not client.decodes:
            self.resume(client)


def speed(world: World, *, seconds: float = 20.0, warm_up: float = 3.0, seed: int = 0) -> tuple[float, Simulation]:
    """Speed with lookups over plain decoding."""
    rates = []
    for is_plain in (True, False):
        simulation = Simulation(world, is_plain=is_plain, seed=seed)
        simulation.run(warm_up)
        rates.append(simulation.run(seconds))
    return rates[1] / rates[0], simulation

"""What each client uses, held against its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NoReturn

from gateway.access.caller import Caller
from specdec.errors import InvalidRequest, Overloaded

#: Clients after whose arrival those are forgotten that use nothing.
FORGET_EVERY: Final = 1024
_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class MinuteBudget:
    """So much a minute, as a token bucket that holds one minute's worth."""

    #: What may be taken now; None: all of it.
    level: float | None = None
    at_s: float = 0.0

    def take(self, amount: float, per_minute: int, now_s: float) -> float:
        """Take an amount; one above the whole budget takes all of it. The seconds to wait where it is not there, and
        then nothing is taken.
        """
        rate = per_minute / _MINUTE_S
        level = float(per_minute) if self.level is None else self.level + (now_s - self.at_s) * rate
        self.level, self.at_s = min(level, per_minute), now_s
        missing = min(amount, per_minute) - self.level
        if missing > 0:
            return missing / rate
        self.level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """Return what was taken and not used."""
        if self.level is not None:
            self.level += amount

    def is_full(self, now_s: float) -> bool:
        """Whether a minute has passed since anything was taken."""
        return self.level is None or (self.level >= 0 and now_s - self.at_s > _MINUTE_S)


@dataclass(slots=True)
class ClientUsage:
    """What one client uses now and has used in the last minute."""

    num_requests: int = 0
    num_sequences: int = 0
    requests: MinuteBudget = field(default_factory=MinuteBudget)
    tokens: MinuteBudget = field(default_factory=MinuteBudget)
    #: Drafted tokens of its attachments that the target rejected.
    rejected: MinuteBudget = field(default_factory=MinuteBudget)

    @property
    def budgets(self) -> tuple[MinuteBudget, ...]:
        """What it uses by the minute."""
        return self.requests, self.tokens, self.rejected


@dataclass(slots=True)
class TokenCount:
    """Tokens of one request so far."""

    num_used: int = 0


class Clients:
    """The usage of all clients of one gateway."""

    def __init__(self, on_refusal: Callable[[Caller, str], None]) -> None:
        """``on_refusal`` gets the caller and the name of the limit whenever a request is refused."""
        self._on_refusal = on_refusal
        self._usage: dict[str, ClientUsage] = {}

    @property
    def num_known(self) -> int:
        """Clients that are remembered."""
        return len(self._usage)

    @contextmanager
    def request(self, caller: Caller, num_sequences: int) -> Iterator[None]:
        """One request in progress, of so many sequences.

        Raises:
            InvalidRequest: the client may never have so many sequences.
            Overloaded: a limit of the client is reached.
        """
        usage, limits = self.usage_of(caller), caller.limits
        if (most := limits.max_client_requests) is not None and usage.num_requests >= most:
            self.refuse(caller, "max_client_requests", f"{usage.num_requests} requests of {most} are in progress")
        most = limits.max_client_sequences
        if most is not None and num_sequences > most:
            self._on_refusal(caller, "max_client_sequences")
            raise InvalidRequest(
                f"the request has {num_sequences} sequences; {_who(caller)} may have {most} at once"
                " (max_client_sequences); lower n or send fewer prompts",
                param="n",
            )
        if most is not None and usage.num_sequences + num_sequences > most:
            text = f"{usage.num_sequences} sequences of {most} are in progress, and this request has {num_sequences}"
            self.refuse(caller, "max_client_sequences", text)
        if (most := limits.client_requests_per_minute) is not None:
            wait_s = usage.requests.take(1, most, time.monotonic())
            if wait_s:
                self.refuse(caller, "client_requests_per_minute", f"{most} requests a minute are allowed", wait_s)
        usage.num_requests += 1
        usage.num_sequences += num_sequences
        try:
            yield
        finally:
            usage.num_requests -= 1
            usage.num_sequences -= num_sequences

    @contextmanager
    def tokens(self, caller: Caller, num_tokens: int) -> Iterator[TokenCount]:
        """Take the tokens that a request may need; what it did not use is given back at its end.

        Raises:
            Overloaded: the tokens of this minute are used up.
        """
        count = TokenCount()
        if (most := caller.limits.client_tokens_per_minute) is None:
            yield count
            return
        budget = self.usage_of(caller).tokens
        if wait_s := budget.take(num_tokens, most, time.monotonic()):
            text = f"{most} tokens a minute are allowed, and this request may need {num_tokens}"
            self.refuse(caller, "client_tokens_per_minute", text, wait_s)
        try:
            yield count
        finally:
            budget.give_back(num_tokens - count.num_used)

    def refuse(self, caller: Caller, limit: str, text: str, wait_s: float = 1.0) -> NoReturn:
        """Refuse what a client asks for: a limit is reached."""
        self._on_refusal(caller, limit)
        raise Overloaded(f"{limit} of {_who(caller)} is reached: {text}; try again later", retry_after_s=wait_s)

    def usage_of(self, caller: Caller) -> ClientUsage:
        """What a client uses now."""
        if caller.client not in self._usage:
            if len(self._usage) % FORGET_EVERY == FORGET_EVERY - 1:
                now_s = time.monotonic()
                self._usage = {
                    client: usage
                    for client, usage in self._usage.items()
                    if usage.num_requests or not all(budget.is_full(now_s) for budget in usage.budgets)
                }
            self._usage[caller.client] = ClientUsage()
        return self._usage[caller.client]


def _who(caller: Caller) -> str:
    return f"the key {caller.key!r}" if caller.key else f"the client {caller.client}"

"""One request of the decoding loop, and the tokens committed to it so far."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace

from gateway.access.caller import Caller
from gateway.decoding.drafters import Drafters
from gateway.placement.routing import Router
from specdec.lookup.prediction import PredictionLookup
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.tracing.headers import TraceHeaders
from specdec.types import SessionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRequest:
    """One sequence to decode."""

    #: Prompt token ids, at least one.
    prompt: tuple[int, ...]
    #: ``max_tokens`` is set. So is ``seed``, and ``stop_token_ids`` holds the end-of-sequence tokens, but for engines.
    params: SamplingParams
    #: None leaves the choice to the target.
    rule: Rule | None = None
    #: Drafted tokens a round at most; 0 decodes plainly.
    num_speculative_tokens: int = 0
    #: What drafts; None: what the gateway is configured with.
    drafters: Drafters | None = None
    #: With the draft that its client brings, in place of those of the gateway; None: it brings none.
    attached: Router | None = None
    #: Tokens that lookups draft in a round at most; None: as many.
    num_looked_up_tokens: int | None = None
    #: What the client expects the text to be; None: nothing.
    prediction: PredictionLookup | None = None
    #: Tokens of the prediction that are drafted in a round at most.
    num_predicted_tokens: int = 0
    #: Name of the conversation, which decides on target and draft; None: it has none.
    session_id: str | None = None
    #: Hashes of the beginnings of the prompt, where one of several targets may have them.
    prefixes: tuple[bytes, ...] = ()
    #: Separates what the caller's requests may have in common.
    cache_salt: str = ""
    #: Who asks; the sessions belong to its key.
    caller: Caller = field(default_factory=Caller)
    #: Whether a target continues the text as the lost one would have, given the tokens so far.
    is_resumable: bool = True
    #: The trace that its sessions belong to.
    trace_headers: TraceHeaders = ()
    #: Moment of the event loop's clock at which the request fails; None means never.
    deadline: float | None = None

    @property
    def is_named(self) -> bool:
        """Whether it belongs to a conversation with a name."""
        return self.session_id is not None

    @property
    def max_looked_up_tokens(self) -> int:
        """Tokens that lookups draft in a round at most."""
        given = self.num_looked_up_tokens
        return self.num_speculative_tokens if given is None else given

    @property
    def max_round_tokens(self) -> int:
        """Drafted tokens of any round at most."""
        return max(self.num_speculative_tokens, self.max_looked_up_tokens, self.num_predicted_tokens)


class RequestState:
    """A request and its committed tokens, the prompt included.

    The decoding loop alone commits. The clients of the target and of the draft read.
    """

    def __init__(self, request: DecodingRequest) -> None:
        self.request = request
        self.session_id = request.session_id or uuid.uuid4().hex
        self._output: list[int] = []
        self._max_len = len(request.prompt) + (request.params.max_tokens or 1)

    def __len__(self) -> int:
        """Committed tokens, those of the prompt included."""
        return len(self.request.prompt) + len(self._output)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._output)

    @property
    def num_remaining(self) -> int:
        """Tokens that ``max_tokens`` still allows."""
        return self._max_len - len(self)

    def after(self, length: int) -> tuple[int, ...]:
        """The committed tokens that follow the first ``length``."""
        prompt = self.request.prompt
        if length >= len(prompt):
            return tuple(self._output[length - len(prompt) :])
        return (*prompt[length:], *self._output)

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Append the tokens of a verdict."""
        self._output += token_ids

    def spec(self, epoch: int, *, with_prompt_logprobs: bool = True) -> SessionSpec:
        """The opening of a session, its ``epoch``-th, with everything committed by now."""
        request = self.request
        params = request.params
        if params.prompt_logprobs is not None and not with_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        return SessionSpec(
            # A server that has not noticed the end of the lost session yet must not take the new one for it.
            session_id=self.session_id if request.is_named or epoch == 1 else f"{self.session_id}.{epoch}",
            epoch=epoch,
            token_ids=(*request.prompt, *self._output) if self._output else request.prompt,
            prompt_len=len(request.prompt),
            params=params,
            rule=request.rule,
            num_speculative_tokens=request.num_speculative_tokens,
            is_named=request.is_named,
            owner=request.caller.key,
            cache_salt=request.cache_salt,
            client=request.caller.client,
            max_kv_share=request.caller.limits.max_client_kv_share,
            trace_headers=request.trace_headers,
        )

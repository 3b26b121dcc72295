"""A draft in the process: of chosen quality, latency and failures."""

from specdec.types import (
    DraftOpened,
    ModelInfo,
    Proposal,
)
from tests.gateway.fakes import VOCAB, FakeBackend, FakeSession, share, states_of


class FakeDraft(FakeBackend):
    """A draft that guesses right with probability ``quality`` per token, always the same after the same tokens."""

    def __init__(self, *, quality=0.8, limit=8, empty_every=0, **kwargs):
        super().__init__(**kwargs)
        self.model = self.model or draft_info(limit)
        self.quality = quality
        self.limit = limit
        self.empty_every = empty_every
        self.num_proposals = 0
        self.on_drain = set()
        #: Proposals that were asked for without the hidden states they need.
        self.num_unready = 0

    async def open(self, spec):
        await self.work("open", self.open_latency_s)
        return FakeDraftSession(self, spec)

    def chain(self, context, k, params):
        """The drafted tokens after ``context``."""
        guess = []
        while len(guess) < k:
            token = self.says([*context, *guess], len(context), params)
            is_right = share("quality", *context, *guess) < self.quality
            guess.append(token if is_right else (token + 1) % VOCAB)
        return tuple(guess)


class FakeDraftSession(FakeSession):
    def __init__(self, backend, spec):
        self.asked = None
        super().__init__(backend, spec)
        self.opened = DraftOpened(spec.epoch, min(backend.limit, spec.num_speculative_tokens))
        #: Positions whose hidden states it was given, and those of the latest message.
        self.known_states = set()
        self.new_states = []
        #: How many the first message had that had any.
        self.num_states_first = 0

    async def advance(self, base_len, token_ids, num_draft_tokens, hidden_states=(), stream_tokens=0):
        assert not stream_tokens, "nothing that is told of this fake asks it to stream"
        assert not self.closed
        assert base_len == len(self.token_ids), "the gateway sent a stale message"
        self.token_ids += token_ids
        layers = self.backend.model.hidden_state_layers
        self.new_states = []
        for block in hidden_states:
            assert not self.new_states or block.start > self.new_states[-1]
            assert block == states_of(self.token_ids, block.start, block.end, layers)
            self.new_states += range(block.start, block.end)
        assert max(self.new_states, default=0) < len(self.token_ids)
        self.num_states_first = self.num_states_first or len(self.new_states)
        self.known_states |= set(self.new_states)
        self.asked = num_draft_tokens or None
        self.wake.set()

    def received_more(self):
        """What :meth:`receive` would return without waiting; an error is the last item there is."""
        items = [self.received.get_nowait() for _ in range(self.received.qsize())]
        if items and isinstance(items[-1], Exception):
            self.received.put_nowait(items.pop())
        return items

    async def step(self):
        if self.asked is None:
            return False
        k, self.asked = self.asked, None
        known = tuple(self.token_ids)
        if self.backend.model.hidden_state_layers:
            self.backend.num_unready += len(known) - 2 not in self.known_states
        await self.backend.work("propose")
        if self.asked is None and len(known) == len(self.token_ids):  # else it is overtaken
            self.received.put_nowait(self.proposal(known, k))
        return True

    def proposal(self, known, k):
        backend = self.backend
        backend.num_proposals += 1
        chain = backend.chain(known, k, self.spec.params)
        if backend.empty_every and backend.num_proposals % backend.empty_every == 0:
            chain = ()
        return Proposal(
            self.spec.epoch,
            len(known),
            chain,
            draft_ns=100 + backend.num_proposals,
        )


def draft_info(limit=8, **changes):
    """The toy draft's description."""
    values = {"name": "toy-draft", "vocab_size": VOCAB, "tokenizer_size": VOCAB, "method": "draft_model"}
    return ModelInfo(**(values | {"num_speculative_tokens": limit, "tokenizer_fingerprint": "toy"} | changes))

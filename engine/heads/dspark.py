"""DSpark (DeepSeek 2026): a DFlash block whose tokens are drawn one after the other, each given the one before.

::

    h = the block's rows after the norm; base = lm_head(h); s = 0
    for each row i:
        e = W1[token before]
        vanilla  bias = W2 e
        gated    bias = W2 (sigmoid(gate_proj [h_i, e]) · e)
        rnn      g, c, o = joint_proj [s, e, h_i];  s = sigmoid(g) · s + (1 - sigmoid(g)) · tanh(c);  bias = W2 tanh(o)
        q = softmax(base_i + bias);  confidence = sigmoid(proj [h_i, e])

The bias is added to the most likely tokens of ``base`` alone, and no other can be drafted: W2 is as large as an output
layer, and q is what the token is drawn from all the same. The confidence estimates the chance that the token is
accepted, and does not depend on it: a chain that ends before it is as exact as a shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from engine.heads.dflash import BlockWalk, DFlashConfig, DFlashHead
from engine.heads.layer import SmallLinear
from engine.sampling.transfer import send

#: How a bias is made of the token before.
MARKOV_TYPES: Final = ("vanilla", "gated", "rnn")
#: Tokens of each row that can be drafted.
NUM_CANDIDATES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Dimensions of a DSpark head."""

    #: Numbers of a token's row in W1 and W2; 0: no bias, a plain DFlash.
    markov_rank: int = 0
    #: One of :data:`MARKOV_TYPES`.
    markov_type: str = MARKOV_TYPES[0]
    has_confidence: bool = False
    #: The confidence reads the token before, too.
    confidence_reads_token: bool = False
    #: Biases of ``gate_proj`` or ``joint_proj``.
    markov_bias: bool = True


class MarkovHead(nn.Module):
    """The bias that the token before gives to the logits."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        size, rank = config.layer.hidden_size, config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Embedding(config.draft_vocab_size, rank)  # rows are looked up
        if config.markov_type == "gated":
            self.gate_proj = SmallLinear(size + rank, rank, bias=config.markov_bias)
        elif config.markov_type == "rnn":
            self.joint_proj = SmallLinear(2 * rank + size, 3 * rank, bias=config.markov_bias)
        self.kind = config.markov_type

    def forward(self, h: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 is multiplied by, and the state after it.

        ``h`` [..., H] of the row, ``embedded`` [..., r] of the token before, ``state`` [..., r]; both results [..., r].
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((h, embedded), dim=-1))) * embedded, state
        if self.kind == "rnn":
            g, c, o = self.joint_proj(torch.cat((state, embedded, h), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(g)
            return torch.tanh(o), gate * state + (1 - gate) * torch.tanh(c)
        return embedded, state

    def along(self, h: Tensor, embedded: Tensor) -> Tensor:
        """What W2 is multiplied by at every row of blocks whose tokens are known: [..., R, H] and [..., R, r] to
        [..., R, r].
        """
        state, outs = torch.zeros_like(embedded[..., 0, :]), []
        for row in range(h.shape[-2]):
            out, state = self(h[..., row, :], embedded[..., row, :], state)
            outs.append(out)
        return torch.stack(outs, dim=-2)


class ConfidenceHead(nn.Module):
    """The chance that a token is accepted, before it is drawn."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.proj = SmallLinear(num_inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., inputs] to logits [...]."""
        out: Tensor = self.proj(inputs)[..., 0]
        return out


class DSparkHead(DFlashHead):
    """Parameters are named as in the published files."""

    method: ClassVar[str] = "dspark"
    config: DSparkConfig

    def __init__(
        self, config: DSparkConfig, *, embeddings: Tensor | None = None, lm_head: Tensor | None = None
    ) -> None:
        super().__init__(config, embeddings=embeddings, lm_head=lm_head)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.has_confidence:
            num_more = config.markov_rank if config.confidence_reads_token else 0
            self.confidence_head = ConfidenceHead(config.layer.hidden_size + num_more)

    def confidence(self, h: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits of the chance of acceptance, [...], of rows [..., H] after tokens [..., r]."""
        reads_token = self.config.confidence_reads_token and embedded is not None
        inputs = torch.cat((h, embedded), dim=-1) if reads_token and embedded is not None else h
        out: Tensor = self.confidence_head(inputs)
        return out

    def trim(self, token_ids: Tensor) -> None:
        """W2 keeps the same rows."""
        super().trim(token_ids)
        if self.config.markov_rank:
            rows = self.markov_head.markov_w2.weight.detach()[token_ids.to(self.d2t.device)]
            self.markov_head.markov_w2 = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=True)

    def walk(self, x: Tensor) -> BlockWalk:
        """The chains of a batch, from the rows of their blocks, [R, H]."""
        return MarkovWalk(self, x)


class MarkovWalk(BlockWalk):
    """The logits along the chains: each token's depend on the one before it."""

    def __init__(self, head: DSparkHead, x: Tensor) -> None:
        super().__init__(head, x)
        self._spark = head
        self._x = x
        #: Confidence of each step: the chains, and their logits.
        self._confidences: list[tuple[Sequence[int], Tensor]] = []
        self._states: Tensor | None = None
        if head.config.markov_rank:
            best = self._logits.topk(min(NUM_CANDIDATES, head.config.draft_vocab_size), dim=-1)
            self._candidates = best.indices  # [R, C], draft ids
            self._base = best.values

    def step(self, chains: Sequence[int], rows: Tensor, previous: Tensor) -> Tensor:
        """As in the base class; -inf for tokens that are no candidates."""
        head, config = self._spark, self._spark.config
        embedded = None
        h = self._x.index_select(0, rows) if config.has_confidence or config.markov_rank else self._x
        if config.markov_rank:
            embedded = head.markov_head.markov_w1(previous)
        if config.has_confidence:
            self._confidences.append((list(chains), head.confidence(h, embedded)))
        if embedded is None:
            return super().step(chains, rows, previous)
        if self._states is None:
            self._states = embedded.new_zeros(max(chains) + 1, config.markov_rank)
        at = send(list(chains), rows.device)
        out, self._states[at] = head.markov_head(h, embedded, self._states[at])
        ids = self._candidates.index_select(0, rows)  # [n, C]
        bias = torch.einsum("ncr,nr->nc", head.markov_head.markov_w2(ids).float(), out.float())
        logits = bias.new_full((len(ids), config.vocab_size), -torch.inf)
        return logits.scatter_(1, head.to_target_ids(ids), self._base.index_select(0, rows) + bias)

    def lengths(self, counts: Sequence[int], least: float) -> list[int]:
        """As in the base class."""
        lengths = list(counts)
        if least <= 0 or not self._confidences:
            return lengths
        values = torch.sigmoid(torch.cat([logits.float() for _, logits in self._confidences])).tolist()
        steps = [(step, chain) for step, (chains, _) in enumerate(self._confidences) for chain in chains]
        for (step, chain), confidence in zip(steps, values, strict=True):
            if confidence < least:
                lengths[chain] = min(lengths[chain], step)
        return lengths

"""DFlash2 (z-lab 2026): a DFlash whose layers mix neighbouring rows of a block, and whose tokens are chosen in turn.

Each sublayer of a layer is wrapped in a causal convolution over the rows of the block, x its normed input::

    d = kernel_projection(x)                                   # [2, taps, H / g] of each row: g channels share one
    conv_s(y)[row] = sum over t of (base_kernel[s, t] + d[s, t](row)) · y[row - t]    # rows before the block are zero
    x = x + conv_1(sublayer(conv_0(x)))

The tokens of a row are its K most likely ones. Their scores depend on the token drawn at the row before::

    score(c) = logits(c) + <A[token before] · (P h), B[c]>     # A, B: codebooks; P: hidden_projection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.heads.dflash import BlockWalk, DFlashConfig, DFlashHead
from engine.heads.head import DraftHead
from engine.heads.layer import Attend, LayerConfig, LlamaLayer, SmallLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """Dimensions of a DFlash2 head."""

    #: Rows that a convolution reads, and channels that share a kernel.
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    #: Numbers of a token's row in the codebooks, and tokens of a row that can be drafted.
    selector_rank: int = 256
    selector_top_k: int = 16


class BlockConvolution(nn.Module):
    """The convolutions around one sublayer."""

    def __init__(self, size: int, num_taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, size))
        self.kernel_projection = nn.Linear(size, 2 * num_taps * (size // group), bias=False)
        self.group = group

    def kernels(self, x: Tensor) -> Tensor:
        """Of each row: [..., R, H] to [..., R, 2, taps, H]."""
        moved: Tensor = self.kernel_projection(x)
        moved = moved.view(*x.shape[:-1], *self.base_kernel.shape[:2], -1).repeat_interleave(self.group, dim=-1)
        return self.base_kernel + moved

    @staticmethod
    def convolve(y: Tensor, kernels: Tensor, places: Tensor) -> Tensor:
        """y [..., R, H] with kernels [..., R, taps, H]; ``places`` int64 [R] of the rows in their blocks."""
        out = kernels[..., 0, :] * y
        for tap in range(1, kernels.shape[-2]):
            before = torch.roll(y, tap, dims=-2) * (places >= tap)[:, None]
            out = out + kernels[..., tap, :] * before
        return out


class ConvolvedLayer(LlamaLayer):
    """A Llama layer with convolutions around its sublayers."""

    def __init__(self, config: LayerConfig, layer: int, num_taps: int, group: int) -> None:
        super().__init__(config, layer)
        self.attention_conv = BlockConvolution(config.hidden_size, num_taps, group)
        self.mlp_conv = BlockConvolution(config.hidden_size, num_taps, group)

    def convolved(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, context: Tensor, places: Tensor
    ) -> Tensor:
        """As :meth:`forward`; ``places`` int64 [R] of the rows in their blocks."""
        normed = self.input_layernorm(x)
        into, out_of = self.attention_conv.kernels(normed).unbind(-3)
        read = BlockConvolution.convolve(normed, into, places)
        x = x + BlockConvolution.convolve(self.self_attn(read, rotation, attend, context), out_of, places)
        normed = self.post_attention_layernorm(x)
        into, out_of = self.mlp_conv.kernels(normed).unbind(-3)
        read = BlockConvolution.convolve(normed, into, places)
        return x + BlockConvolution.convolve(self.mlp(read), out_of, places)


class CandidateSelector(nn.Module):
    """What a token gives to the scores of the next row's candidates."""

    def __init__(self, vocab_size: int, size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = SmallLinear(size, rank, bias=False)


class DFlash2Head(DFlashHead):
    """Parameters are named as in the published files."""

    method: ClassVar[str] = "dflash2"
    config: DFlash2Config

    def __init__(
        self, config: DFlash2Config, *, embeddings: Tensor | None = None, lm_head: Tensor | None = None
    ) -> None:
        super().__init__(config, embeddings=embeddings, lm_head=lm_head)
        self.candidate_selector = CandidateSelector(config.vocab_size, config.layer.hidden_size, config.selector_rank)

    def trim(self, token_ids: Tensor) -> None:
        """Refused: the selector's tables are of all tokens."""
        DraftHead.trim(self, token_ids)

    def make_layer(self, index: int) -> nn.Module:
        """A layer with convolutions."""
        config = self.config
        return ConvolvedLayer(config.layer, index, config.conv_kernel_size, config.conv_group_size)

    def run_layers(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, context: Tensor, places: Tensor
    ) -> Tensor:
        """[..., R, H] to [..., R, H]."""
        for layer in self.layers:
            assert isinstance(layer, ConvolvedLayer)
            x = layer.convolved(x, rotation, attend, context, places)
        return x

    def walk(self, x: Tensor) -> BlockWalk:
        """The chains of a batch, from the rows of their blocks, [R, H]."""
        return SelectorWalk(self, x)


class SelectorWalk(BlockWalk):
    """The scores along the chains."""

    def __init__(self, head: DFlash2Head, x: Tensor) -> None:
        super().__init__(head, x)
        self._selector = head.candidate_selector
        self._projected = self._selector.hidden_projection(x)  # [R, r]
        best = self._logits.topk(head.config.selector_top_k, dim=-1)
        self._candidates, self._base = best.indices, best.values  # [R, K]

    def step(self, chains: Sequence[int], rows: Tensor, previous: Tensor) -> Tensor:
        """As in the base class; -inf for tokens that are no candidates."""
        before = self._selector.predecessor_codebook[previous] * self._projected.index_select(0, rows)
        ids = self._candidates.index_select(0, rows)
        bias = torch.einsum("nkr,nr->nk", self._selector.successor_codebook[ids].float(), before.float())
        logits = bias.new_full((len(ids), self._head.config.vocab_size), -torch.inf)
        return logits.scatter_(1, ids, self._base.index_select(0, rows) + bias)

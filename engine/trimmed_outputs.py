"""An output layer of some tokens alone: a draft need not be able to draft every token.

With a vocabulary of 250,000 tokens the output layer is most of a small draft's work (FR-Spec: Zhao et al. 2025, arXiv
2502.14856). Tokens that are left out get -inf, so the distribution a draft draws from is that over the others: what it
tells of it stays exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import ModelNotSupported


class TrimmedOutputs(nn.Module):
    """The rows of an output layer that stand for some tokens."""

    #: int64 [Vd], ascending.
    token_ids: Tensor

    def __init__(self, layer: nn.Linear, token_ids: Tensor) -> None:
        """``layer`` [V, H] is not kept; ``token_ids`` int64 [Vd], ascending, without repeats."""
        super().__init__()
        self.vocab_size = layer.out_features
        self.linear = rows_of(layer, token_ids)
        self.register_buffer("token_ids", token_ids.to(layer.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., V]."""
        return self.widen(self.linear(x))

    def widen(self, logits: Tensor) -> Tensor:
        """[..., Vd] over the tokens that are drafted to [..., V]."""
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.token_ids] = logits
        return whole


def output_linear(model: Any) -> Any:
    """The linear layer that computes a language model's logits: of a trimmed one that of the tokens it drafts."""
    own = model.get_output_embeddings()
    return own.linear if isinstance(own, TrimmedOutputs) else own


def drafted_tokens(model: Any) -> Tensor | None:
    """The tokens that a trimmed model drafts, int64 [Vd]; None: it is not trimmed."""
    own = model.get_output_embeddings()
    return own.token_ids if isinstance(own, TrimmedOutputs) else None


def rows_of(layer: nn.Linear, token_ids: Tensor) -> nn.Linear:
    """A layer of some rows of another one, copied."""
    at = token_ids.to(layer.weight.device)
    rows = layer.weight.detach().index_select(0, at)
    part = nn.Linear(rows.shape[1], rows.shape[0], bias=layer.bias is not None, device="meta")
    part.weight = nn.Parameter(rows, requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach().index_select(0, at), requires_grad=False)
    return part


def trim_outputs(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Let a model draft these tokens alone.

    Raises:
        ModelNotSupported: its output layer is quantised, or none.
    """
    layer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(layer) is not nn.Linear or not layer.weight.is_floating_point():
        raise ModelNotSupported(
            f"the output layer of {type(model).__name__} is no plain linear layer, so draft_vocab cannot take rows of"
            " it; leave draft_vocab out"
        )
    model.set_output_embeddings(TrimmedOutputs(layer, token_ids))  # type: ignore[no-untyped-call]

"""Pairs of random weights in the shape of models that people run: what speed depends on, without their weights.

A target's first layers are its draft; the output projections of the others are zero, so that they cost what they cost
and change nothing. The draft's output layer is the target's with noise, by which about one token in five differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.checkpoints import MODELS, TARGET

#: Standard deviation of the noise on the draft's output rows, in those of the rows: of 4096 normally distributed
#: logits the largest stays the largest with a probability of 0.81.
_NOISE: Final = 0.1
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A Llama of this shape, with an output layer of its own, and how many of its layers are the draft."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_draft_layers: int = 1

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads

    @property
    def draft(self) -> PairShape:
        """The draft's shape."""
        return replace(self, num_layers=self.num_draft_layers)

    @property
    def num_read(self) -> int:
        """Weights a pass reads: all but the embeddings, of which it reads a row per token."""
        kv = self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (self.hidden_size + kv)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return self.num_read + self.vocab_size * self.hidden_size

    @property
    def kv_per_token(self) -> int:
        """Numbers a token leaves in the cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def config(self, num_layers: int, max_model_len: int) -> Any:
        """The configuration for transformers."""
        return AutoConfig.for_model(
            "llama",
            num_hidden_layers=num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=max_model_len,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


SHAPES: Final[Mapping[str, PairShape]] = {
    # TinyLlama 1.1B: grouped heads of 64.
    "1B": PairShape(
        num_layers=22, hidden_size=2048, intermediate_size=5632, num_heads=32, num_kv_heads=4, vocab_size=32000
    ),
    # Llama 2 7B: as many key heads as heads, of 128.
    "7B": PairShape(
        num_layers=32, hidden_size=4096, intermediate_size=11008, num_heads=32, num_kv_heads=32, vocab_size=32000
    ),
    # To try the command without a GPU.
    "tiny": PairShape(num_layers=3, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, vocab_size=4160),
}


def write_pair(
    shape: PairShape, folder: Path, *, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> tuple[str, str]:
    """Write a target and its draft under ``folder``, with the bundled models' tokenizer; returns their folders.

    The weights are drawn on ``device``.
    """
    torch.manual_seed(0)
    num_tokens = int(AutoConfig.from_pretrained(MODELS / TARGET).vocab_size)
    target = _make(shape.config(shape.num_layers, max_model_len), dtype, device)
    with torch.no_grad():
        for layer in target.model.layers[shape.num_draft_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.lm_head.weight[num_tokens:] = 0  # never the most likely, for everyone who generates
    _save(target, folder / "target")
    draft = _make(shape.config(shape.num_draft_layers, max_model_len), dtype, device)
    draft.load_state_dict(target.state_dict(), strict=False)  # the layers it has not are left out
    del target
    with torch.no_grad():
        rows = draft.lm_head.weight[:num_tokens]
        rows += _NOISE * rows.std() * torch.randn_like(rows)
    _save(draft, folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def _make(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model.eval()


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(MODELS / TARGET / name, folder / name)

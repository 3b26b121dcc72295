"""Tiny Llamas of random weights, and the text that transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build_llama(*, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Weights so large that the next token depends on much of the context: greedy text that does not loop at once.

    ``options``: the config's; ``vocab_size`` and ``max_position_embeddings`` at least.
    """
    torch.manual_seed(seed)
    usual = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(usual | options))).eval()


@torch.inference_mode()
def greedy_text(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model's own ``generate`` continues a prompt with."""
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    text: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return text

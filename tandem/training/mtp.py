"""A prediction layer (MTP) of a target that has none: its start, and its chains."""

import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from engine.heads.mtp import MtpConfig, MtpHead, PredictionLayer
from tandem.training.lesson import Lessons
from tandem.training.unroll import ChainAttention, Guess

_CHAINS: Final = "tandem_chains"


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
    """Transformers' attention [B, heads, S, D] as the attention of the chains."""
    return options["attend"](*(each.transpose(1, 2) for each in (query, key, value)), 0), None


AttentionInterface.register(_CHAINS, _attend)


def create_mtp(target: PreTrainedModel) -> MtpHead:
    """A fresh layer of the target's kind, with attention to all tokens, on its embedding and output layer."""
    config = copy.deepcopy(target.config.get_text_config())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None
    given: Any = target
    classes: Any = AutoModelForCausalLM
    body = classes.from_config(config, dtype=torch.float32)
    body.get_input_embeddings().weight.data.copy_(given.get_input_embeddings().weight)
    body.get_output_embeddings().weight.data.copy_(given.get_output_embeddings().weight)
    shape = MtpConfig(vocab_size=config.vocab_size, hidden_size=config.hidden_size)
    return MtpHead(shape, [PredictionLayer(config.hidden_size, body)])


def unroll_mtp(head: MtpHead, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
    """A single layer, used again: what it makes in a step is the state of the next."""
    layer: Any = head.layers[0]
    body = head.bodies[0]
    body.set_attn_implementation(_CHAINS)
    size = lesson.rows.shape[1] - num_steps
    features, attend = lesson.states[:, :size], ChainAttention()
    for step in range(num_steps):
        embedded = head.embed_tokens(lesson.rows[:, step + 1 : step + 1 + size])
        x = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(features)], -1))
        positions = torch.arange(step, step + size, device=x.device)[None]
        decoder: Any = body.get_decoder()  # type: ignore[no-untyped-call]
        features = decoder(inputs_embeds=x, position_ids=positions, use_cache=False, attend=attend).last_hidden_state
        yield Guess(head.logits(features), step + 1)

"""A small hybrid that writes real text: a trained Llama with recurrent layers between its own, which then learn.

Only they are trained, and their output projections begin with zeros: the text is good from the first step on, and
depends on the recurrent states more and more.
"""

from typing import Final

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, LlamaForCausalLM

#: A recurrent layer stands before each so many layers of attention.
_ATTENTION_LAYERS: Final = 2
_HEAD_DIM: Final = 64
_STATE_SIZE: Final = 64
_RECURRENT, _ATTENTION = "linear_attention", "full_attention"


def grow_hybrid(llama: LlamaForCausalLM) -> GraniteMoeHybridForCausalLM:
    """A model in the shape of Granite 4 with Mamba2 layers that add nothing yet; only these have gradients."""
    config = llama.config
    kinds = [
        kind
        for layer in range(config.num_hidden_layers)
        for kind in ([_RECURRENT, _ATTENTION] if layer % _ATTENTION_LAYERS == 0 else [_ATTENTION])
    ]
    head_dim = config.hidden_size // config.num_attention_heads
    hybrid = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=len(kinds),
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            attention_multiplier=head_dim**-0.5,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
            position_embedding_type="rope",
            tie_word_embeddings=True,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            num_local_experts=0,
            shared_intermediate_size=config.intermediate_size,
            layer_types=kinds,
            mamba_expand=2,
            mamba_n_heads=2 * config.hidden_size // _HEAD_DIM,
            mamba_d_head=_HEAD_DIM,
            mamba_d_state=_STATE_SIZE,
        )
    )
    known = llama.state_dict()
    weights = {name: known[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    own = iter(range(config.num_hidden_layers))
    for index, kind in enumerate(kinds):
        if kind == _ATTENTION:
            prefix = f"model.layers.{next(own)}."
            layer = {name.removeprefix(prefix): part for name, part in known.items() if name.startswith(prefix)}
            gate, up, down = (layer.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
            layer |= {"shared_mlp.input_linear.weight": torch.cat((gate, up)), "shared_mlp.output_linear.weight": down}
            weights |= {f"model.layers.{index}.{name}": part for name, part in layer.items()}
    hybrid.load_state_dict(weights, strict=False)
    for name, parameter in hybrid.named_parameters():
        parameter.requires_grad_(name not in weights)
        if name not in weights and name.endswith(("mamba.out_proj.weight", "shared_mlp.output_linear.weight")):
            torch.nn.init.zeros_(parameter)
    return hybrid

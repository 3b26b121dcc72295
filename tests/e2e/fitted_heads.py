"""Heads for the bundled target without any training: what is linear in them is solved for, the rest is random noise.

A linear guess at the target's next state from the last one and the token between them is accepted now and then, so
rounds of every outcome occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.heads.dflash import DFlashConfig, DFlashHead, Reach
from engine.heads.dspark import DSparkConfig, DSparkHead
from engine.heads.eagle import EagleConfig, EagleHead
from engine.heads.eagle3 import Eagle3Config, Eagle3Head
from engine.heads.files.checkpoint import write_head
from engine.heads.head import DraftHead
from engine.heads.layer import LayerConfig, RopeConfig
from engine.heads.medusa import MedusaConfig, MedusaHeads
from engine.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig

#: Weight of the squares of a solution beside those of its errors, relative to the data's.
RIDGE = 1e-3


@torch.no_grad()
def write_heads(folder: Path, target_folder: str, texts: Sequence[Sequence[int]]) -> None:
    """One folder for each kind of head, fitted to the target's states on some texts."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    embeddings, lm_head = target.get_input_embeddings().weight, target.lm_head.weight
    states = [target.model(torch.tensor([list(text)])).last_hidden_state[0] for text in texts]
    ids = [torch.tensor(text) for text in texts]
    config = target.config
    layer = LayerConfig(
        hidden_size=config.hidden_size,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope=RopeConfig(theta=700.0),
    )

    eagle = EagleHead(EagleConfig(layer=layer, vocab_size=config.vocab_size), embeddings=embeddings, lm_head=lm_head)
    eagle.fc.bias.zero_()
    inputs = torch.cat([torch.cat((embeddings[i[1:]], s[:-1]), dim=-1) for i, s in zip(ids, states, strict=True)])
    eagle.fc.weight.copy_(solved(inputs, torch.cat([s[1:] for s in states])))
    eagle.attentions[0].o_proj.weight.mul_(0.05)
    eagle.layers[0].mlp.down_proj.weight.mul_(0.05)

    eagle3 = Eagle3Head(
        Eagle3Config(
            layer=layer,
            target_hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            draft_vocab_size=1000,
            hidden_state_layers=(2, 3, 3),
        ),
        embeddings=embeddings,
    )
    eagle3.set_vocabulary(torch.cat(ids).bincount(minlength=config.vocab_size).topk(1000).indices.sort().values)

    medusa = MedusaHeads(MedusaConfig(hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_heads=4))
    for distance, head in enumerate(medusa, 1):
        block, output = head
        nn.init.zeros_(block.linear.weight)
        nn.init.zeros_(block.linear.bias)
        later = solved(torch.cat([s[:-distance] for s in states]), torch.cat([s[distance:] for s in states]))
        output.weight.copy_(lm_head @ later)

    mlp = MlpSpeculator(
        MlpSpeculatorConfig(
            emb_dim=config.hidden_size,
            inner_dim=96,
            vocab_size=config.vocab_size,
            n_predict=5,
            scale_input=True,
            tie_weights=True,
        )
    )
    block: dict[str, Any] = {
        "layer": replace(layer, qk_norm=True),
        "reaches": (Reach(is_causal=True, window=64), Reach()),
        "target_hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "hidden_state_layers": (2, 3),
        "block_size": 6,
        "mask_token_id": 0,
    }
    markov = DSparkConfig(
        **block,
        predicts_next=True,
        markov_rank=8,
        markov_type="gated",
        has_confidence=True,
        confidence_reads_token=True,
    )
    heads: dict[str, DraftHead] = {
        "eagle": eagle,
        "eagle3": eagle3,
        "dflash": DFlashHead(DFlashConfig(**block), embeddings=embeddings, lm_head=lm_head),
        "dspark": DSparkHead(markov, embeddings=embeddings, lm_head=lm_head),
        "medusa": medusa,
        "mlp_speculator": mlp,
    }
    for name, head in heads.items():
        write_head(head, folder / name)


def solved(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The matrix M [out, in] with the smallest |inputs Mᵀ - outputs|² + RIDGE |M|²."""
    squares = inputs.double().T @ inputs.double()
    squares += RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    return torch.linalg.solve(squares, inputs.double().T @ outputs.double()).T.float()

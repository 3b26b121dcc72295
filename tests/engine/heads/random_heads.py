"""EAGLE heads with random weights, and what they compute written out: every row again, over a dense mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from engine.chain_job import Drawing
from engine.heads.eagle import EagleConfig, EagleHead
from engine.heads.eagle3 import Eagle3Config, Eagle3Head
from engine.heads.layer import LayerConfig, RopeConfig
from engine.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from engine.sampling.drafting import DraftedChain, collect, draft
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.rules import Rule

Head = EagleHead | Eagle3Head
M = TypeVar("M", bound=nn.Module)
VOCAB = 97


def layer_config(hidden: int = 32, **changes: object) -> LayerConfig:
    options = {
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=700.0),
    }
    return LayerConfig(**(options | changes))  # type: ignore[arg-type]


def eagle(*, bias: bool = True, **changes: object) -> EagleHead:
    layer = layer_config(**changes)  # type: ignore[arg-type]
    tables = torch.randn(2, VOCAB, layer.hidden_size, generator=torch.Generator().manual_seed(5))
    config = EagleConfig(layer=layer, vocab_size=VOCAB, bias=bias)
    return shaken(EagleHead(config, embeddings=tables[0], lm_head=tables[1].clone()))


def eagle3(
    layer: LayerConfig | None = None,
    *,
    vocab: int = VOCAB,
    draft_vocab: int = 41,
    target_hidden: int = 24,
    num_layers: int = 1,
    states: tuple[int, ...] = (2, 3, 4),
    **flags: bool,
) -> Eagle3Head:
    config = Eagle3Config(
        layer=layer or layer_config(),
        target_hidden_size=target_hidden,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        hidden_state_layers=states,
        num_layers=num_layers,
        owns_embeddings=True,
        **flags,
    )
    head = Eagle3Head(config)
    head.set_vocabulary(torch.randperm(vocab, generator=torch.Generator().manual_seed(6))[:draft_vocab].sort().values)
    return shaken(head)


#: Every variant the kernels know; sizes that are no multiples of a panel, a vector or two are among them.
HEADS: dict[str, Callable[[], Head]] = {
    "eagle": eagle,
    "eagle without bias, odd sizes": lambda: eagle(
        bias=False, hidden=37, intermediate_size=75, head_dim=10, num_attention_heads=3, num_key_value_heads=1
    ),
    "eagle with biases": lambda: eagle(qkv_bias=True, o_bias=True, mlp_bias=True),
    "eagle3": eagle3,
    "eagle3, odd sizes": lambda: eagle3(
        layer_config(35, intermediate_size=51, head_dim=6, qkv_bias=True), target_hidden=19
    ),
    "eagle3, all tokens": lambda: eagle3(draft_vocab=VOCAB),
    "eagle3, normed residual": lambda: eagle3(norm_before_residual=True),
    "eagle3, one norm before fc": lambda: eagle3(norm_before_fc=True),
    "eagle3, norms before fc": lambda: eagle3(fc_norm=True, norm_before_residual=True),
    "eagle3.1": lambda: eagle3(fc_norm=True, norm_output=True),
    "eagle3 of three layers": lambda: eagle3(num_layers=3, norm_output=True),
    "eagle3, qwen3": lambda: eagle3(layer_config(qk_norm=True), num_layers=2, norm_before_residual=True),
    "eagle3, yarn": lambda: eagle3(
        layer_config(
            rope=RopeConfig(rope_type="yarn", options=(("factor", 4.0), ("original_max_position_embeddings", 32)))
        )
    ),
    "eagle3, wide": lambda: eagle3(layer_config(256, head_dim=32, num_attention_heads=8), target_hidden=192),
}


def shaken(head: M) -> M:
    """Weights so large that every part tells."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(11)
        for parameter in head.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return head.eval().requires_grad_(False)


def num_features(head: Head) -> int:
    """Numbers of the target's states for each row."""
    return head.num_features


def random_features(head: Head, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    features = torch.randn(count, num_features(head), generator=torch.Generator().manual_seed(seed))
    return features.to(dtype)


def causal(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    """Attention of rows [T, heads, D] to those before them and themselves."""
    count, group = query.shape[0], query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def run(head: Head, token_ids: Sequence[int], states: Tensor) -> Tensor:
    """What every row of one sequence brings, [T, H]; ``states`` [T, H] are fused already."""
    ids = torch.tensor(token_ids)
    return head(ids, states, torch.arange(len(ids)), causal)


def chain(  # noqa: PLR0917
    head: Head,
    token_ids: Sequence[int],
    features: Tensor,
    num_tokens: int,
    state: SamplingState,
    rule: Rule,
) -> DraftedChain:
    """A chain after pairs of tokens and features: all of the sequence's, from the first on."""
    ids, states = list(token_ids), head.fuse(features.float())
    rows, steps = Rows.after([state]), []
    for _ in range(num_tokens):
        brought = run(head, ids, states)[-1:]
        drafted = draft(head.to_target_logits(head.logits(brought)), rows, [rule])
        steps.append(drafted)
        rows = rows.extended(drafted.token_ids)
        ids.append(int(drafted.token_ids))
        states = torch.cat((states, brought))
    return collect(steps, [num_tokens])[0] if steps else DraftedChain(())


def mlp_speculator(*, tie: bool, scale: bool, emb_dim: int = 30, inner: int = 24, steps: int = 4) -> MlpSpeculator:
    config = MlpSpeculatorConfig(
        emb_dim=emb_dim, inner_dim=inner, vocab_size=VOCAB, n_predict=steps, scale_input=scale, tie_weights=tie
    )
    return shaken(MlpSpeculator(config))


def mlp_chain(
    mlp: MlpSpeculator, states: Tensor, last_tokens: Sequence[int], jobs: Sequence[Drawing]
) -> list[DraftedChain]:
    """The chains of all jobs, one by one."""
    chains = []
    for row, token, job in zip(states, last_tokens, jobs, strict=True):
        ids, state, rows, steps = [token], mlp.start(row[None].float()), Rows.after([job.state]), []
        for step in range(job.num_tokens):
            state = mlp(torch.tensor(ids[-1:]), state, step)
            drafted = draft(mlp.logits(state, step), rows, [job.rule])
            steps.append(drafted)
            rows = rows.extended(drafted.token_ids)
            ids.append(int(drafted.token_ids))
        chains.append(collect(steps, [job.num_tokens])[0] if steps else DraftedChain(()))
    return chains

"""The check at load: heads whose kernels agree with their modules pass, and what is wrong in one of them shows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from engine.chain_job import ChainJob
from engine.heads.eagle3 import Eagle3Head
from engine.heads.native.eagle import NativeHead
from engine.heads.paged import PagedHead
from engine.native.linears import NativeLinear
from engine.native.rounded import quantise_linears
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import ModelSettings
from tests.engine.heads.random_heads import HEADS, VOCAB, Head, chain, eagle, eagle3, random_features


def paged(head: Head, **settings: object) -> PagedHead:
    options = {"kv_cache_memory_bytes": 1 << 20, "num_threads": 2} | settings
    return PagedHead(head, ModelSettings(model="head", **options), 200)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", HEADS)
def test_heads_pass(name: str, weights: torch.dtype) -> None:
    head = HEADS[name]()
    if weights is torch.int8:
        quantise_linears(head)
    else:
        head = head.to(weights)
    assert paged(head).path == "native head"


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_cache_of_a_few_blocks_is_enough(num_blocks: int) -> None:
    head = eagle3()
    layer = head.config.layer
    entry = 2 * 4 * layer.num_key_value_heads * layer.head_dim
    runner = paged(head, block_size=4, kv_cache_memory_bytes=4 * entry * (num_blocks + 1))
    assert (runner.pool.total_blocks, runner.pool.used_blocks) == (num_blocks, 0)
    assert runner.path == "native head"


def swap_norms(head: Head) -> None:
    layer = head.midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def forget_bias(head: Head) -> None:
    head.fc.bias = None


def forget_final_norm(head: Head) -> None:
    head.norm.weight.fill_(1)


def scale_attention(head: Head) -> None:
    head.layers[0].self_attn.q_proj.weight.mul_(1.1)


@pytest.mark.parametrize(
    ("make", "damage"),
    [(eagle3, swap_norms), (eagle, forget_bias), (eagle3, forget_final_norm), (eagle, scale_attention)],
    ids=["swapped norms", "no bias", "no final norm", "scale"],
)
def test_what_is_wrong_shows_and_the_module_drafts(
    make: Callable[[], Head],
    damage: Callable[[Head], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build = NativeHead.build

    def damaged(head: Head, *args: Any) -> NativeHead | None:
        twin = deepcopy(head)
        damage(twin)
        assert build(head, *args) is not None  # packs the layers of the module
        return build(twin, *args)

    monkeypatch.setattr(NativeHead, "build", damaged)
    head = make()
    module = deepcopy(head)
    with caplog.at_level(logging.WARNING):
        runner = paged(head)
    assert runner.path == "torch"
    assert "is not used: " in caplog.text
    assert "differ from the stock model" in caplog.text
    assert isinstance(head.fc, NativeLinear)
    params = SamplingParams(temperature=0.0, max_tokens=10, seed=1)
    token_ids, features = [3, 1, 4, 1, 5], random_features(head, 5, seed=2)
    state = SamplingState(params, token_ids, len(token_ids), VOCAB)
    job = ChainJob(runner.pool.open(20), token_ids, 4, state, Rule.BLOCK, features=features)
    with torch.no_grad():
        assert runner.draft_chains([job]) == [chain(module, token_ids, features, 4, state, Rule.BLOCK)]


def test_a_head_the_kernels_do_not_know_gets_packed_layers() -> None:
    head = eagle3(norm_before_fc=True, fc_norm=True)
    assert paged(head).path == "torch"
    assert isinstance(head.fc, NativeLinear)


def test_eager_heads_stay_as_they_are() -> None:
    head = eagle3()
    assert isinstance(head, Eagle3Head)
    assert paged(head, enforce_eager=True).path == "torch"
    assert type(head.fc) is torch.nn.Linear

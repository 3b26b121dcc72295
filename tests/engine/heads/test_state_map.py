"""A head's first layer, evaluated by the target: the same features, and prints that tell maps apart."""

import pytest
import torch

from engine.heads.eagle3 import LAST_STATE
from engine.heads.files import checkpoint
from engine.native.linears import pack_linears
from engine.state_map import StateMap
from specdec.errors import InvalidRequest
from tests.engine.heads import random_heads
from tests.engine.heads.random_heads import eagle3, layer_config, shaken


def normed(x, norm):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_before_fc": True, "fc_norm": True}]
)
def test_it_computes_the_features(flags):
    head = eagle3(**flags)
    states = torch.randn(5, 3 * 24, generator=torch.Generator().manual_seed(1))
    x = normed(states, head.input_norm) if "norm_before_fc" in flags else states
    if "fc_norm" in flags:
        x = torch.cat([normed(part, norm) for part, norm in zip(x.split(24, 1), head.fc_norm, strict=True)], 1)
    found = head.state_map
    assert (found.layers, found.width) == ((2, 3, 4), 32)
    features = x @ head.fc.weight.T
    torch.testing.assert_close(found(states), features)
    torch.testing.assert_close(head.fuse(states), features)
    pack_linears(found, 1)
    torch.testing.assert_close(found(states), features, rtol=1e-4, atol=1e-5)
    assert found.width == 32


def test_heads_whose_features_are_no_smaller_have_none():
    assert random_heads.eagle().state_map is None
    assert eagle3(layer_config(24), states=LAST_STATE).state_map is None
    assert eagle3(layer_config(24, head_dim=6), target_hidden=24, states=(2,)).state_map is None
    assert random_heads.mlp_speculator(tie=False, scale=False).state_map is None


def test_the_fingerprint_tells_maps_apart():
    print_of = lambda head: head.state_map.fingerprint()  # noqa: E731
    known = print_of(eagle3(fc_norm=True))
    assert known == print_of(eagle3(fc_norm=True))
    assert known == print_of(eagle3(fc_norm=True, norm_before_residual=True))  # what comes after does not matter
    others = [
        eagle3(),
        eagle3(fc_norm=True, states=(1, 3, 4)),
        eagle3(layer_config(rms_norm_eps=1e-6), fc_norm=True),
        eagle3(fc_norm=True).to(torch.bfloat16),
        shaken(eagle3(fc_norm=True)),
    ]
    with torch.no_grad():
        others[-1].fc.weight[3, 7] += 1e-3
    prints = {print_of(head) for head in others}
    assert len(prints) == len(others)
    assert known not in prints


def test_a_target_without_memory_for_it_says_so(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("all of it")

    monkeypatch.setattr(checkpoint, "read_head", lambda *_: eagle3())
    assert checkpoint.read_state_map("head", "target", torch.device("cpu")) is not None
    monkeypatch.setattr(StateMap, "to", full)
    with pytest.raises(
        InvalidRequest, match=r"no memory on cpu for the first layer of head: .* leave it out of hidden"
    ):
        checkpoint.read_state_map("head", "target", torch.device("cpu"))

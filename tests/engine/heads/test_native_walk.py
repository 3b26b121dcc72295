"""The check of chains along blocks at load: each kind of head passes it, and planted bugs do not."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.heads.native.walk import NativeWalk
from tests.draft_service.drafters.heads.test_block_rules import HEADS
from tests.engine.heads.random_heads import shaken


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chains_are_the_modules(kind, dtype, caplog):
    assert NativeWalk.build(shaken(HEADS[kind]()).to(dtype), 1) is not None
    assert not caplog.text


@pytest.mark.parametrize(
    ("kind", "field", "text"),
    [
        ("gated", "before", "of a greedy chain"),
        ("rnn", "weights", "of a greedy chain"),
        ("dflash2", "after", "of a greedy chain"),
        ("vanilla", "sure_weights", "where the confidence is below"),
    ],
)
def test_another_table_is_noticed(kind, field, text, monkeypatch, caplog):
    """Planted: one of the tables is another."""
    keep = NativeWalk.draft_chains

    def wrong(self, *args):
        other = 3 * torch.randn(4096, generator=torch.Generator().manual_seed(2))
        setattr(self._struct, field, other.data_ptr())
        return keep(self, *args)

    monkeypatch.setattr(NativeWalk, "draft_chains", wrong)
    with caplog.at_level(logging.WARNING):
        assert NativeWalk.build(shaken(HEADS[kind]()), 1) is None
    assert text in caplog.text

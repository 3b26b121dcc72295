"""A batch of draft heads waits for a GPU once: when the drafted tokens are fetched.

As in the tests of whole rounds, the device "meta" stands for a GPU.
"""

import numpy as np
import pytest
import torch

from draft_service.drafters.heads.eagle import PagedTreePasses
from draft_service.drafters.heads.medusa import MedusaTreePasses
from draft_service.drafters.heads.mlp_speculator import MlpTreePasses
from draft_service.drafters.trees.tree_passes import TreeJob, draft_trees
from engine.chains import ChainJob, draw_chains
from engine.heads.blocks import PagedBlocks
from engine.heads.medusa import MedusaConfig, MedusaHeads
from engine.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from engine.heads.paged import PagedHead
from engine.kv_sequence import KVSequence
from engine.loading import acceleration, kernel_check
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import ModelSettings
from specdec.tree_shape import TreeShape
from tests.draft_service.drafters.heads.test_block_rules import HEADS
from tests.engine.cuda.test_rounds import META, Watch
from tests.engine.heads.random_heads import VOCAB, eagle, eagle3, shaken

TOKENS = [5, 7, 11, 13]


def states_of_every_rule():
    kinds = [(0.0, Rule.BLOCK), (1.0, Rule.BLOCK), (1.0, Rule.COUPLED), (1.0, Rule.TOKEN)]
    return [
        (SamplingState(SamplingParams(seed=i, temperature=t, top_p=0.9), TOKENS, 4, VOCAB, device=META), rule)
        for i, (t, rule) in enumerate(kinds)
    ]


class Kernels:
    """Attention as a GPU's kernels do it, by shapes; they have tests of their own."""

    def write_kv(self, k_cache, v_cache, key, value, plan):
        assert key.device == plan.slots.device == META

    def paged_attention(self, query, *_):
        return torch.empty_like(query)


def on_device(head, monkeypatch, make=PagedHead):
    """A head as it is after its first batch: the frequencies of the rotary embedding have come, too."""
    head.rotary(torch.empty(1, device=META), head.dtype)
    monkeypatch.setattr(acceleration, "triton_attention", Kernels)
    monkeypatch.setattr(kernel_check, "difference", lambda *_, **__: None)
    settings = ModelSettings(model="head", kv_cache_memory_bytes=1 << 20)
    return make(head.to(META), settings, 64)


@pytest.mark.parametrize("build", [eagle, eagle3])
def test_chains_on_a_cache(build, monkeypatch):
    head = build()
    paged = on_device(head, monkeypatch)
    width = head.num_features
    jobs = [
        ChainJob(paged.pool.open(30), TOKENS[1:], 1 + i % 3, state, rule, features=torch.zeros(3, width))
        for i, (state, rule) in enumerate(states_of_every_rule() * 2)
    ]
    with Watch() as watch:
        chains = paged.draft_chains(jobs)
    assert watch.num_fetched == 1
    assert [len(chain.token_ids) for chain in chains] == [job.num_tokens for job in jobs]
    assert all(job.sequence.length == 3 for job in jobs)


@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_blocks_on_a_cache(kind, monkeypatch):
    head = shaken(HEADS[kind]())
    paged = on_device(head, monkeypatch, lambda *args: PagedBlocks(*args, num_tokens=4))
    jobs = [
        ChainJob(paged.pool.open(30), [3, 5, 6], 1 + i % 3, state, rule, features=torch.zeros(3, head.num_features))
        for i, (state, rule) in enumerate(states_of_every_rule() * 2)
    ]
    with Watch() as watch:
        chains = paged.draft_chains(jobs)
    assert watch.num_fetched == 1
    assert [len(chain.token_ids) for chain in chains] == [job.num_tokens for job in jobs]
    assert all(job.sequence.length == 3 for job in jobs)


def test_a_level_of_a_tree_on_a_cache(monkeypatch):
    head = eagle3()
    paged = on_device(head, monkeypatch)
    features = torch.zeros(3, head.fc.in_features)
    jobs = [
        TreeJob(paged.pool.open(40), TOKENS[1:], TreeShape(2, 3), 8, state, rule)
        for state, rule in states_of_every_rule()
    ]
    passes = PagedTreePasses(paged, {job.sequence: features for job in jobs})
    with torch.inference_mode(), Watch() as watch:
        trees = draft_trees(passes, jobs, lambda: [False] * 4)
    assert watch.num_fetched == 3  # once a level
    assert all(tree.parents for tree in trees)


def test_heads_on_one_state():
    medusa = MedusaHeads(MedusaConfig(hidden_size=16, vocab_size=VOCAB, num_heads=3)).to(META)
    mlp = MlpSpeculator(MlpSpeculatorConfig(emb_dim=16, inner_dim=8, vocab_size=VOCAB, n_predict=3)).to(META)
    for make in (lambda states: MedusaTreePasses(medusa, states, 3), lambda states: MlpTreePasses(mlp, states)):
        jobs = [
            TreeJob(KVSequence(np.empty(0, np.int32), 2**31), TOKENS[-1:], TreeShape(2, 3), 8, state, rule)
            for state, rule in states_of_every_rule()
        ]
        passes = make({job.sequence: torch.zeros(1, 16, device=META) for job in jobs})
        with torch.inference_mode(), Watch() as watch:
            draft_trees(passes, jobs, lambda: [False] * 4)
        assert watch.num_fetched == 3
    logits = torch.zeros(4, VOCAB, device=META)
    jobs = [
        ChainJob(KVSequence(np.empty(0, np.int32), 9), TOKENS, 2, state, rule) for state, rule in states_of_every_rule()
    ]
    with torch.inference_mode(), Watch() as watch:
        draw_chains(logits, jobs, lambda continuing, tokens: logits[: len(continuing)], None)
    assert watch.num_fetched == 1

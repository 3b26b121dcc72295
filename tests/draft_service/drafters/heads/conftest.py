"""A tiny target with a head of every kind, cores on them, and what the heads compute by their formulas."""

from __future__ import annotations

import pytest

from engine import chains
from engine.sampling.drafting import draft
from specdec.settings import DraftSettings, SchedulerSettings, SpeculativeSettings
from tests.draft_service.conftest import make_model_settings, running
from tests.draft_service.drafters.heads.talk import KINDS, K
from tests.engine.heads import block_files as blocks
from tests.engine.heads import checkpoints as files
from tests.engine.heads import reference

#: Heads that draft a block, and how their rows attend.
BLOCKS = {
    "dflash": {
        "config": blocks.dflash_config(),
        "tensors": blocks.block_tensors(),
        "causal": (True, False),
        "windows": (7, None),
        "predicts_next": False,
    },
    "dflash2": {
        "config": blocks.dflash2_config(),
        "tensors": blocks.block_tensors(convolved=True),
        "causal": (False, False),
        "windows": (7, None),
        "predicts_next": False,
    },
    "dspark": {
        "config": blocks.dspark_config(),
        "tensors": blocks.block_tensors(markov="rnn", own=True),
        "causal": (False, False),
        "windows": (None, None),
        "predicts_next": True,
        "markov": "rnn",
    },
}


@pytest.fixture(scope="module")
def target():
    return files.build_target()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    files.write_target(folder / "target", target)
    for published in (
        (folder / "eagle", files.eagle_config(), files.eagle_tensors(), "pytorch_model.bin"),
        (folder / "eagle3", files.eagle3_config(), files.eagle3_tensors(), "model.safetensors"),
        (folder / "medusa", files.medusa_config(), files.medusa_tensors(), "medusa_lm_head.pt"),
        (
            folder / "mlp_speculator",
            files.mlp_config(n_predict=5, scale_input=True, tie_weights=True),
            files.mlp_tensors(n_predict=5, tied=True, once=True),
            "model.safetensors",
        ),
        (folder / "dflash", blocks.dflash_config(), blocks.block_tensors(), "model.safetensors"),
        (folder / "dflash2", blocks.dflash2_config(), blocks.block_tensors(convolved=True), "model.safetensors"),
        (folder / "dspark", blocks.dspark_config(), blocks.block_tensors(markov="rnn", own=True), "model.safetensors"),
    ):
        files.write_head_files(*published)
    return folder


@pytest.fixture
def start(folder):
    """``async with start(method) as core``: a core that holds no block when it is left."""

    def start_core(method, k=K, scheduler=None, *, lookup=None, speculative=None, **model):
        settings = DraftSettings(
            speculative=SpeculativeSettings(
                model=str(folder / method),
                method=(lookup, method) if lookup else method,
                num_speculative_tokens=k,
                draft_tensor_parallel_size=1,
                **(speculative or {}),
            ),
            model=make_model_settings(str(folder / method), **({"kv_cache_memory_bytes": 1 << 20} | model)),
            target_model=str(folder / "target"),
            scheduler=SchedulerSettings(**(scheduler or {})),
        )
        return running(settings)

    return start_core


@pytest.fixture(scope="module")
def formula(target):
    """``formula(method)(tokens, states)``: logits of each step after the tokens, by the reference."""
    embeddings, lm_head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()

    def of(method):
        if method == "medusa":
            return lambda tokens, states: reference.medusa_step(files.medusa_tensors(), states[len(tokens) - 2])
        if method == "mlp_speculator":
            config = files.mlp_config(n_predict=5, scale_input=True, tie_weights=True)
            tensors = files.mlp_tensors(n_predict=5, tied=True)
            bare = {name.removeprefix("speculator."): value for name, value in tensors.items()}
            return lambda tokens, states: reference.mlp_step(config, bare, tokens[-1], states[len(tokens) - 2])
        if method in BLOCKS:
            model = blocks.BlockReference(
                **BLOCKS[method], embeddings=embeddings, lm_head=lm_head, num_rows=K + (method != "dspark")
            )
            of.models[method] = model
            return lambda tokens, states, start=0: model.after(tokens, list(states[start : len(tokens) - 1]), start)
        config, tensors, theta = {
            "eagle": (files.eagle_config(), files.eagle_tensors(), files.DRAFT_ROPE),
            "eagle3": (files.eagle3_config(), files.eagle3_tensors(), 10000.0),
        }[method]
        model = reference.EagleReference(config, tensors, embeddings=embeddings, lm_head=lm_head, theta=theta)
        of.models[method] = model
        return lambda tokens, states, start=0: model.after(tokens, list(states[start : len(tokens) - 1]), start)

    of.target, of.models = target, {}
    for method in KINDS:
        of(method)
    return of


@pytest.fixture
def seen(monkeypatch):
    """The logits that every draw has seen, in order."""
    logits = []

    def recording(rows, *rest):
        logits.append(rows.clone())
        return draft(rows, *rest)

    monkeypatch.setattr(chains, "draft", recording)
    return logits

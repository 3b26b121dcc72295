"""Tiny random Llamas, draft cores on the real engine, and a target to judge their proposals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from draft_service.core import DraftCore
from engine.engine import Engine, Kept, Segment
from engine.loading.load import load_engine
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import DraftSettings, ModelSettings, SchedulerSettings, SpeculativeSettings
from specdec.types import Proposal, SessionSpec
from target_service.verification.rounds import Round
from target_service.verification.verifier import Verifier
from tests.llamas import build_llama

VOCAB = 48
#: The mask of the draft that drafts in parallel.
MASK = 47
CONTEXT = 2048


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


def build_draft(seed: int = 0) -> LlamaForCausalLM:
    return build_llama(seed=seed, vocab_size=VOCAB, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def llama():
    return build_draft()


@pytest.fixture(scope="session")
def checkpoint(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    llama.save_pretrained(folder)
    return str(folder)


def save_parallel(model: PreTrainedModel, folder: Path, mask: int = MASK) -> str:
    """A checkpoint that drafts in parallel, whatever it has learned."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"spd_type": "pard", "pard_token": mask}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def parallel_checkpoint(llama, tmp_path_factory):
    """The draft's weights again, to draft in parallel."""
    return save_parallel(llama, tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory):
    """Another model of the same vocabulary, for a target that often disagrees."""
    folder = tmp_path_factory.mktemp("target")
    build_draft(seed=1).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def kindred_checkpoint(tmp_path_factory):
    """The draft's weights, each a little changed: for a target that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("kindred")
    model = build_draft()
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight), alpha=0.1 * float(weight.std()))
    model.save_pretrained(folder)
    return str(folder)


def make_model_settings(folder: str, **changes) -> ModelSettings:
    return ModelSettings(model=folder, num_threads=1, **({"kv_cache_memory_bytes": 8 << 20} | changes))


@pytest.fixture
def model_settings():
    return make_model_settings


@asynccontextmanager
async def running(settings: DraftSettings) -> AsyncIterator[DraftCore]:
    """A core that holds no session when it is left, and no block."""
    core = await DraftCore.start(settings)
    try:
        yield core
        load = await core.load()
        assert load.open_sessions == 0
        assert load.used_blocks == 0
    finally:
        await core.close()


@pytest.fixture
def start_core(checkpoint):
    """``async with start_core(…) as core``: a core that holds no block when it is left."""

    def start(method="draft_model", k=4, model=None, scheduler=None, **speculative):
        settings = DraftSettings(
            speculative=SpeculativeSettings(model=checkpoint, method=method, num_speculative_tokens=k, **speculative),
            model=make_model_settings(**({"folder": checkpoint} | (model or {}))),
            scheduler=SchedulerSettings(**(scheduler or {})),
        )
        return running(settings)

    return start


def make_spec(token_ids: Sequence[int], **changes) -> SessionSpec:
    """A greedy session unless told otherwise; SamplingParams and SessionSpec fields are both taken."""
    spec_fields = {name: changes.pop(name) for name in tuple(changes) if name in SessionSpec.__dataclass_fields__}
    params = SamplingParams(**({"temperature": 0.0, "seed": 7, "max_tokens": 1500} | changes))
    defaults = {
        "session_id": "s",
        "token_ids": tuple(token_ids),
        "prompt_len": len(token_ids),
        "params": params,
        "num_speculative_tokens": 64,
    }
    return SessionSpec(**(defaults | spec_fields))


@pytest.fixture
def spec():
    return make_spec


@pytest.fixture
def greedy(llama):
    """``greedy(prefix, k)``: the k tokens the stock model continues a prefix with."""

    @torch.inference_mode()
    def continuation(token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(int(llama(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tuple(tokens[len(token_ids) :])

    return continuation


class Target:
    """The target's side of one session: the real engine and verifier, without a service around them."""

    def __init__(self, engine: Engine, spec: SessionSpec) -> None:
        self._engine = engine
        self._rule = spec.rule or Rule.BLOCK
        self.state = SamplingState(spec.params, spec.token_ids, spec.prompt_len, engine.info.vocab_size)
        self._sequence = engine.pool.open(CONTEXT)

    @torch.inference_mode()
    def verify(self, proposal: Proposal | None = None) -> tuple[int, tuple[int, ...]]:
        """One round: how many drafts were accepted, and the tokens it committed."""
        drafted = proposal.token_ids if proposal is not None else ()
        q_rows = proposal.q_rows if proposal is not None else ()
        parents = proposal.parents if proposal is not None else ()
        pending = self.state.token_ids[self._sequence.length :]
        if parents:
            if pending[1:]:
                self._engine.forward([Segment(self._sequence, pending[:-1], 0)])
            pending = pending[-1:]
        start, follows = self._sequence.length, (-1, *(parent + 1 for parent in parents)) if parents else ()
        logits = self._engine.forward(
            [Segment(self._sequence, [*pending, *drafted], len(drafted) + 1, parents=follows)]
        )
        (outcome,) = Verifier().verify(logits, [Round(self.state, self._rule, 0, drafted, q_rows, None, parents)])
        assert outcome.error is None
        if parents:
            self._engine.keep_rows([Kept(self._sequence, start, (0, *(i + 1 for i in outcome.path)))])
        self.state.commit(outcome.token_ids)
        self._engine.pool.rollback(self._sequence, len(self.state) - 1)
        return outcome.num_accepted, outcome.token_ids

    def close(self) -> None:
        self._engine.pool.release(self._sequence)


@pytest.fixture(scope="session")
def target_engine(checkpoint, one_thread):
    """A target with the draft's own weights."""
    engine = load_engine(make_model_settings(checkpoint))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def other_engine(other_checkpoint, one_thread):
    engine = load_engine(make_model_settings(other_checkpoint))
    yield engine
    engine.close()


@pytest.fixture
def make_target():
    return Target


@pytest.fixture(scope="session")
def kindred_engine(kindred_checkpoint, one_thread):
    engine = load_engine(make_model_settings(kindred_checkpoint))
    yield engine
    engine.close()


@pytest.fixture
def own_target(target_engine):
    """``own_target(spec)``: the target's side of a session, with the draft's own weights."""
    return partial(Target, target_engine)


@pytest.fixture
def kindred_target(kindred_engine):
    """The same with weights that are nearly the draft's."""
    return partial(Target, kindred_engine)

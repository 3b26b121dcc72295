"""An MLP speculator on the native kernels of a CPU: a chain is one call, a step two products and a norm."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.chain_job import Drawing, StopFlags
from engine.heads.mlp_speculator import MlpSpeculator
from engine.native.chains import draw_chains
from engine.native.draft_structs import CMlp, CMlpStep
from engine.native.layer_parts import LinearGroup
from engine.native.library import DTYPES, WEIGHT_DTYPES, NativeLibrary, load
from engine.native.linears import matrix_of
from engine.native.packing import Packing
from engine.native.rounded import Int8Linear, is_plain
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE, Rule

logger = logging.getLogger(__name__)

#: Chains that are compared with the module's at load.
_NUM_CHECKED: Final = 8
#: Of the logits' spread: how far a drafted token may be below the best one, for rounding.
_TOLERANCES: Final = {torch.float32: 1e-2, torch.bfloat16: 0.2}


class NativeMlp:
    """An MLP speculator on its packed weights."""

    def __init__(self, library: NativeLibrary, mlp: MlpSpeculator, num_threads: int, autotune: str) -> None:
        """Pack the weights of a speculator that :meth:`build` found suitable. Its module runs on them too."""
        config = mlp.config
        weight_dtype = matrix_of(mlp.head[0]).dtype
        places = [(modules, str(i)) for modules in (mlp.proj, mlp.head) for i in range(len(modules))]
        groups = {id(modules[int(i)]): LinearGroup(modules, [i]) for modules, i in places}
        packing = Packing(library, list(groups.values()), num_threads)
        proj, head = _packed(packing, mlp.proj), _packed(packing, mlp.head)
        tables: list[Any] = list(mlp.emb)
        norms: list[Any] = list(mlp.ln)
        embeddings: list[Tensor] = [packing.keep(table.weight.detach()) for table in tables]
        steps = (CMlpStep * config.n_predict)()
        for i, step in enumerate(steps):
            step.proj, step.head = proj[i], head[i]
            step.embedding = embeddings[i].data_ptr()
            step.weight, step.bias = packing.floats(norms[i].weight), packing.floats(norms[i].bias)
        self.num_steps = config.n_predict
        self.num_features = config.emb_dim
        self.vocab_size = config.vocab_size
        self.num_threads = num_threads
        self._library = library
        self._kept = (packing, steps)  # what the structure points into
        self._struct = CMlp(
            steps=ctypes.addressof(steps),
            num_steps=config.n_predict,
            features=config.emb_dim,
            inner=config.inner_dim,
            vocab=config.vocab_size,
            scale=config.emb_weight / config.state_weight,
            scales_input=config.scale_input,
            weight_dtype=WEIGHT_DTYPES[weight_dtype],
            embedding_dtype=DTYPES[embeddings[0].dtype],
            **packing.choose_prefetch(autotune),
        )

    @classmethod
    def build(cls, mlp: nn.Module, num_threads: int, autotune: str = "cached") -> NativeMlp | None:
        """A speculator on the native kernels, or None where there are none, they do not know its weights, or chains are
        not those of the module.

        Its linear layers are replaced by packed ones, so it can still be run by itself; their own weights are freed.
        ``autotune``: see :func:`~engine.native.autotune.choose_prefetch`.
        """
        library = load()
        if library is None:
            return None
        reason = _unknown(mlp)
        if reason is not None:
            logger.info("the native kernels do not know this speculator: %s", reason)
            return None
        assert isinstance(mlp, MlpSpeculator)
        with torch.inference_mode(False), torch.no_grad():
            native = cls(library, mlp, num_threads, autotune)
        difference = _difference(mlp, native)
        if difference is not None:
            logger.warning("the native speculator is not used: %s", difference)
            return None
        return native

    def draft_chains(
        self, jobs: Sequence[Drawing], last_tokens: Sequence[int], states: Tensor, stop: StopFlags | None = None
    ) -> list[DraftedChain]:
        """A chain for every job, after its last committed token.

        ``states`` [jobs, num_features] of the target, float32 or bfloat16, on the CPU: those the last tokens were
        predicted from. Chains whose ``stop`` flag is raised end at the next step.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
            ValueError: a chain is longer than the speculator has steps, or the states do not fit.
        """
        if states.shape != (len(jobs), self.num_features) or states.dtype not in DTYPES:
            raise ValueError(f"states {tuple(states.shape)} of {states.dtype}, not {(len(jobs), self.num_features)}")
        longest = max(job.num_tokens for job in jobs)
        if longest > self.num_steps:
            raise ValueError(f"{longest} tokens: the speculator has {self.num_steps} steps")
        states = states.contiguous()
        tokens: array[int] = array("q", last_tokens)
        at, _ = tokens.buffer_info()
        row_bytes = self.num_features * states.itemsize
        fed = [(0, at + 8 * i, states.data_ptr() + i * row_bytes, 1, 0, 0, 0) for i in range(len(jobs))]
        self._struct.features_dtype = DTYPES[states.dtype]
        address = ctypes.addressof(self._struct)

        def call(chains: int, stop_at: int | None, out: int) -> None:
            status = self._library.draft_mlp(address, chains, len(jobs), stop_at, out, self.num_threads)
            if status == -2:
                raise InvalidRequest(
                    f"a token id is outside the vocabulary of {self.vocab_size} tokens", param="token_ids"
                )
            if status:
                raise MemoryError("working memory for a chain")

        return draw_chains(jobs, fed, stop, call)


def _packed(packing: Packing, modules: nn.ModuleList) -> list[int]:
    """The addresses of linear layers, which may be one object several times, packed in place."""
    originals, addresses = list(modules), list[int]()
    for i, layer in enumerate(originals):
        first = originals.index(layer)
        if first < i:
            modules[i] = modules[first]
        addresses.append(packing.linear(LinearGroup(modules, [str(i)])).weight if first == i else addresses[first])
    return addresses


@dataclass(frozen=True, slots=True)
class _Greedy:
    """A greedy chain of the check."""

    state: SamplingState
    num_tokens: int
    rule: Rule = DEFAULT_RULE


def _difference(mlp: MlpSpeculator, native: NativeMlp) -> str | None:
    """None where every token of some greedy chains is the module's choice, or as good as that; else what differs."""
    config, generator = mlp.config, torch.Generator().manual_seed(20)
    last = torch.randint(config.vocab_size, (_NUM_CHECKED,), generator=generator)
    dtype = mlp.ln[0].weight.dtype
    assert isinstance(dtype, torch.dtype)
    tolerance = _TOLERANCES[dtype]
    states = torch.randn(_NUM_CHECKED, config.emb_dim, generator=generator).to(dtype)
    greedy = SamplingParams(temperature=0.0, seed=0)
    with torch.inference_mode():
        jobs = [
            _Greedy(SamplingState(greedy, [token], 1, config.vocab_size), config.n_predict) for token in last.tolist()
        ]
        chains = torch.tensor([chain.token_ids for chain in native.draft_chains(jobs, last.tolist(), states)])
        state, token_ids = mlp.start(states), last
        for step in range(config.n_predict):
            state = mlp(token_ids, state, step)
            logits, token_ids = mlp.logits(state, step).float(), chains[:, step]
            behind = (logits.amax(-1) - logits.gather(1, token_ids[:, None])[:, 0]) / logits.std(-1)
            if not bool((behind <= tolerance).all()):
                return (
                    f"in step {step} of {config.n_predict} a token of a greedy chain is {float(behind.max()):.3g} of"
                    " the logits' spread below the module's"
                )
    return None


def _unknown(mlp: Any) -> str | None:
    """Why a speculator is not one these kernels compute, or None."""
    if not isinstance(mlp, MlpSpeculator):
        return f"it is a {type(mlp).__name__}"
    kind, dtype = type(mlp.head[0]), matrix_of(mlp.head[0]).dtype
    for linear in (*mlp.proj, *mlp.head):
        if type(linear) is not kind or not (isinstance(linear, Int8Linear) or is_plain(linear)):
            return "linear layers that are not plain"
        if matrix_of(linear).dtype != dtype:
            return "weights of several dtypes"
    kinds = {part.weight.dtype for part in (*mlp.emb, *mlp.ln)}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        return "weights of several dtypes"
    return None

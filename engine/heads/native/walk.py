"""Chains along blocks on the native kernels of a CPU: all tokens of a batch are drawn in one call."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.chain_job import ChainJob, StopFlags
from engine.heads import dspark
from engine.heads.dflash import DFlashHead
from engine.heads.dflash2 import DFlash2Head
from engine.heads.dspark import MARKOV_TYPES, DSparkHead
from engine.kv_sequence import KVSequence
from engine.native.chains import draw_chains
from engine.native.draft_structs import CWalk
from engine.native.library import DTYPES, NativeLibrary, load
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE

logger = logging.getLogger(__name__)

#: Chains of the check at load, and how far a token of theirs may lie below the module's choice, in parts of the logits'
#: spread.
_NUM_CHECKED: Final = 2
_TOLERANCE: Final = 1e-2
#: ``WalkKind`` of walk.cpp.
_KINDS: Final = {kind: i + 1 for i, kind in enumerate((*MARKOV_TYPES, "product"))}


class NativeWalk:
    """The part of a head that comes after its pass."""

    def __init__(self, library: NativeLibrary, head: DFlashHead, num_threads: int) -> None:
        """``head`` as it was loaded: its small layers are never packed."""
        config = head.config
        self._library = library
        self._head = head
        self._num_threads = num_threads
        self._inner: tuple[Tensor, Tensor | None] | None = None
        self._sure: tuple[Tensor, Tensor] | None = None
        self._struct = CWalk(vocab=config.vocab_size, outputs=config.draft_vocab_size)
        self._kept: list[Tensor] = []  # what the structure points into
        if config.draft_vocab_size != config.vocab_size:
            ids = head.to_target_ids(torch.arange(config.draft_vocab_size)).to(torch.int32)
            self._struct.target_ids = self._keep(ids)
        if isinstance(head, DSparkHead):
            self._read(head)
        elif isinstance(head, DFlash2Head):
            selector = head.candidate_selector
            self._read_tables("product", selector.predecessor_codebook, selector.successor_codebook)
            self._inner = selector.hidden_projection.weight, None

    @classmethod
    def build(cls, head: DFlashHead, num_threads: int) -> NativeWalk | None:
        """None where there are no kernels, they do not know the dtype of the tables, or chains are not those of the
        module.
        """
        library = load()
        if library is None or head.dtype not in DTYPES:
            return None
        walk = cls(library, head, num_threads)
        with torch.inference_mode():
            difference = _difference(head, walk)
        if difference is not None:
            logger.warning("%s: chains are not drawn natively: %s", type(head).__name__, difference)
            return None
        return walk

    def draft_chains(
        self, x: Tensor, rows: Sequence[int], jobs: Sequence[ChainJob], stop: StopFlags | None
    ) -> tuple[list[DraftedChain], Tensor | None]:
        """The chains of all jobs, and the logits of the confidences, float32 [jobs, depth].

        ``x`` [R, H] of :meth:`DFlashHead.forward`; ``rows``: of each job the row that predicts its first token.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        head, struct = self._head, self._struct
        logits = head.logits(x).float().contiguous()
        held = [logits, first := torch.tensor(rows, dtype=torch.int64)]
        struct.logits, struct.rows = logits.data_ptr(), first.data_ptr()
        if struct.rank:
            most = head.config.selector_top_k if isinstance(head, DFlash2Head) else dspark.NUM_CANDIDATES
            struct.num_candidates = min(most, logits.shape[1])
            held.append(candidates := logits.topk(struct.num_candidates, dim=-1).indices)
            struct.candidates = candidates.data_ptr()
        if self._inner is not None:
            held.append(inner := F.linear(x, *self._inner).float().contiguous())
            struct.inner = inner.data_ptr()
        confidences = None
        if self._sure is not None:
            held.append(sure := F.linear(x, *self._sure).float().contiguous())
            struct.sure = sure.data_ptr()
            confidences = torch.zeros(len(jobs), max(job.num_tokens for job in jobs))
            struct.confidences = confidences.data_ptr()
        tokens: array[int] = array("q", [job.token_ids[-1] for job in jobs])
        at, _ = tokens.buffer_info()
        fed = [(0, at + 8 * i, 0, 1, 0, 0, 0) for i in range(len(jobs))]
        address = ctypes.addressof(struct)

        def call(chains: int, stop_at: int | None, out: int) -> None:
            if self._library.draft_walk(address, chains, len(jobs), stop_at, out, self._num_threads):
                raise MemoryError("working memory for a chain")  # token ids were checked when they were fed

        chains = draw_chains(jobs, fed, stop, call)
        del held
        return chains, confidences

    def _read(self, head: DSparkHead) -> None:
        config, struct = head.config, self._struct
        size, rank = config.layer.hidden_size, config.markov_rank
        if rank:
            markov = head.markov_head
            self._read_tables(config.markov_type, markov.markov_w1.weight, markov.markov_w2.weight)
            if config.markov_type == "gated":
                layer = markov.gate_proj  # reads the row, then the token
                self._inner = layer.weight[:, :size].contiguous(), layer.bias
                struct.weights = self._keep(layer.weight[:, size:].float())
            elif config.markov_type == "rnn":
                layer = markov.joint_proj  # reads the state, the token, then the row
                self._inner = layer.weight[:, 2 * rank :].contiguous(), layer.bias
                struct.weights = self._keep(layer.weight[:, : 2 * rank].float())
        if config.has_confidence:
            proj = head.confidence_head.proj
            self._sure = proj.weight[:, :size].contiguous(), proj.bias
            if config.confidence_reads_token:
                struct.sure_weights = self._keep(proj.weight[0, size:].float())

    def _read_tables(self, kind: str, before: Tensor, after: Tensor) -> None:
        self._struct.rank, self._struct.kind = before.shape[1], _KINDS[kind]
        self._struct.table_dtype = DTYPES[before.dtype]
        self._struct.before, self._struct.after = self._keep(before), self._keep(after)

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor that lives as long as this."""
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def _difference(head: DFlashHead, native: NativeWalk) -> str | None:
    """None where every token of some greedy chains is the module's choice, or as good as that, and so are its
    confidences; else what differs.
    """
    config, generator = head.config, torch.Generator().manual_seed(20)
    count = config.max_tokens
    x = torch.randn(_NUM_CHECKED * count, config.layer.hidden_size, generator=generator).to(head.dtype)
    last = torch.randint(config.vocab_size, (_NUM_CHECKED,), generator=generator)
    greedy = SamplingParams(temperature=0.0, seed=0)
    nowhere = KVSequence(np.empty(0, dtype=np.int32), capacity=0)
    jobs = [
        ChainJob(nowhere, [token], count, SamplingState(greedy, [token], 1, config.vocab_size), DEFAULT_RULE)
        for token in last.tolist()
    ]
    rows = torch.arange(0, len(x), count)
    chains, confidences = native.draft_chains(x, rows.tolist(), jobs, None)
    walk, before = head.walk(x), last
    for step, tokens in enumerate(torch.tensor([chain.token_ids for chain in chains]).T):
        logits = walk.step(range(_NUM_CHECKED), rows + step, before)
        spread = logits.where(logits.isfinite(), logits.amax(-1, keepdim=True)).std(-1).clamp_min(1e-6)
        behind = (logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]) / spread
        if not bool((behind <= _TOLERANCE).all()):
            return f"token {step} of a greedy chain is {float(behind.max()):.3g} of the spread below the module's"
        before = tokens
    for least in (0.3, 0.5, 0.7) if confidences is not None else ():
        found = torch.sigmoid(confidences) if confidences is not None else rows
        ends = [below.index(True) if True in below else count for below in (found < least).tolist()]
        near = bool(((found - least).abs() < _TOLERANCE).any())
        if ends != walk.lengths([count] * _NUM_CHECKED, least) and not near:
            return f"chains end at {ends} where the confidence is below {least}"
    return None

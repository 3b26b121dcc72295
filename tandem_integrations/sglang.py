"""Tandem's draft service as the drafter of SGLang, by SGLang's own registry of speculative algorithms.

::

    tandem draft --model path/to/draft --port 50062
    TANDEM_DRAFT=127.0.0.1:50062 sglang serve --model-path path/to/target \\
      --speculative-algorithm TANDEM --speculative-num-draft-tokens 5

SGLang finds :func:`register` by the entry point of this package. It verifies and samples; a draft that is late or lost
costs speed. With ``--speculative-eagle-topk`` above 1 it verifies the trees that the service drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specdec.settings.option import require
from tandem_integrations.sessions import RemoteSessions, RowDraft
from tandem_integrations.settings import RemoteDraftSettings

#: Value of ``--speculative-algorithm``.
NAME: Final = "TANDEM"
#: Tokens of a verification without ``--speculative-num-draft-tokens``: the last committed one and four drafts.
NUM_DRAFT_TOKENS: Final = 5
#: Requests at once without ``--max-running-requests``, as with SGLang's own lookups.
MAX_RUNNING_REQUESTS: Final = 48


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A sequence that the engine names, in the parts it keeps: ``parts`` one after another are the committed tokens."""

    name: str
    parts: tuple[Sequence[int] | array[int], ...]
    num_new: int = 1

    @property
    def length(self) -> int:
        """Committed tokens."""
        return sum(map(len, self.parts))

    @property
    def keys(self) -> tuple[Hashable, Hashable]:
        """The name."""
        return self.name, self.name

    def tokens(self, start: int) -> list[int]:
        """The committed tokens from ``start`` on; O(tokens returned)."""
        found: list[int] = []
        for part in self.parts:
            found += part[max(0, start) :]
            start -= len(part)
        return found


def rows_of(batch: Any, stride: int, *, is_behind: bool) -> list[NamedRow]:
    """The sequences of SGLang's batch. ``is_behind``: what the last step committed is not in its requests yet, but in
    ``spec_info``, ``stride`` places for each.
    """
    newest: list[list[int]] = [[] for _ in batch.reqs]
    if is_behind:
        tokens, lengths = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
        newest = [tokens[i * stride : i * stride + length] for i, length in enumerate(lengths)]
    return [
        NamedRow(request.rid, (request.origin_input_ids_unpadded, request.output_ids, new))
        for request, new in zip(batch.reqs, newest, strict=True)
    ]


def tree_of(draft: RowDraft, last_token: int, size: int) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """A draft as SGLang verifies it: ``size`` tokens, and bool [size, size], which marks of each its ancestors and
    itself.

    The first is the last committed token. Those without a draft have no ancestor, so verification never reaches them.
    """
    tokens = [last_token, *draft.token_ids[: size - 1]]
    mask = np.eye(size, dtype=np.bool_)
    for index in range(1, len(tokens)):
        parent = draft.parents[index - 1] + 1 if draft.parents else index - 1
        mask[index] |= mask[parent]
    return tokens + [0] * (size - len(tokens)), mask


def register() -> None:
    """Make ``--speculative-algorithm TANDEM`` known: the entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415 (no engine before it is used)
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo  # noqa: PLC0415

    class RemoteDraftAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # untyped
        """What the scheduler does for lookups on the CPU it does for this one, too."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            resolve_arguments(server_args)

    def worker_class(server_args: Any) -> type:
        return make_worker_class()

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=RemoteDraftAlgorithm)(worker_class)


def resolve_arguments(server_args: Any) -> None:
    """Set the arguments that follow from the algorithm, as SGLang does for its own lookups.

    Raises:
        InvalidRequest: an argument cannot be honoured.
    """
    require(
        server_args.attn_dp_size == 1,
        "attn_dp_size",
        f"attn_dp_size is {server_args.attn_dp_size}; --speculative-algorithm {NAME} needs 1, as SGLang's lookups do",
    )
    if server_args.device == "cpu":
        server_args.disable_overlap_schedule = True
    server_args.enable_mixed_chunk = False
    for name, value in (
        ("max_running_requests", MAX_RUNNING_REQUESTS),
        ("speculative_num_draft_tokens", NUM_DRAFT_TOKENS),
        ("speculative_eagle_topk", 1),
    ):
        if getattr(server_args, name) is None:
            setattr(server_args, name, value)
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
    require(
        server_args.speculative_eagle_topk == 1
        or (server_args.page_size or 1) == 1
        or server_args.attention_backend == "flashinfer",
        "speculative_eagle_topk",
        f"speculative_eagle_topk is {server_args.speculative_eagle_topk}, and page_size {server_args.page_size};"
        " trees on pages of several tokens need --attention-backend flashinfer",
    )


def make_worker_class() -> type:
    """SGLang's worker for lookups, which asks the draft service instead of its own corpus."""
    from sglang.srt.distributed import get_tp_group  # noqa: PLC0415 (no engine before it is used)
    from sglang.srt.speculative.ngram_worker import NGRAMWorker  # noqa: PLC0415

    class RemoteDraftWorker(NGRAMWorker):  # type: ignore[misc]  # untyped
        """One per rank. The first rank of the tensor-parallel group asks and tells the others."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            model = target_worker.model_runner.model_config
            self._vocab_size = model.vocab_size
            self._group = get_tp_group()
            self.sessions = None
            if self._group.rank_in_group == 0:
                settings = RemoteDraftSettings.read({})
                self.sessions = RemoteSessions(settings, self.draft_token_num - 1, model.context_len)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
            """int64 [rows * n] and bool [rows * n * n] for n tokens a row: see :func:`tree_of`."""
            size, trees = self.draft_token_num, None
            if self.sessions is not None:
                is_behind = self.enable_overlap and not batch.grammar_needs_sync()
                rows = rows_of(batch, size, is_behind=is_behind)
                trees = [
                    tree_of(self._usable(draft), row.tokens(row.length - 1)[0], size)
                    for row, draft in zip(rows, self.sessions.draft(rows), strict=True)
                ]
            tokens, masks = zip(*self._group.broadcast_object(trees), strict=True)
            return np.concatenate([np.array(ids, dtype=np.int64) for ids in tokens]), np.concatenate(masks).reshape(-1)

        def _usable(self, draft: RowDraft) -> RowDraft:
            """A chain unless trees are verified; nothing if it holds tokens that the target does not know."""
            if any(token_id >= self._vocab_size for token_id in draft.token_ids):
                return RowDraft()
            return draft if self.topk > 1 else RowDraft(draft.chain())

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing: the corpus of the worker for lookups stays empty."""

    return RemoteDraftWorker

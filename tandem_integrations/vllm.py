"""Tandem's draft service as the drafter of vLLM, by vLLM's own hook for proposers.

::

    tandem draft --model path/to/draft --port 50062
    vllm serve path/to/target --additional-config '{"tandem": {"draft": "127.0.0.1:50062"}}' \\
      --speculative-config '{"method": "custom_class", "model": "tandem_integrations.vllm.RemoteProposer",
                             "num_speculative_tokens": 4}'

vLLM verifies and samples; a draft that is late or lost costs speed. Drafters that read hidden states of the
target (EAGLE and other heads) cannot be used: the hook does not hand them over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandem_integrations.sessions import BatchRow, RemoteSessions
from tandem_integrations.settings import RemoteDraftSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


class RemoteProposer:
    """What vLLM 0.32 and 0.33 call ``custom_class``. Options are in ``additional_config["tandem"]`` or the environment:
    see :class:`RemoteDraftSettings`.
    """

    def __init__(self, vllm_config: VllmConfig, *, is_output_rank: Callable[[], bool] | None = None) -> None:
        """``is_output_rank``: whether this process's drafts are those that count; None asks vLLM."""
        settings = RemoteDraftSettings.read(_options(vllm_config.additional_config))
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self._sessions = RemoteSessions(settings, speculative.num_speculative_tokens, model.max_model_len)
        self._vocab_size = model.get_vocab_size()
        self._ask_rank = is_output_rank or _is_output_rank
        self._is_output_rank: bool | None = None

    def load_model(self, target_model: Any) -> None:
        """Nothing: the draft's model is in its own service."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of the next step.

        ``sampled_token_ids``: tokens that this step committed, by row of the batch; ``num_tokens_no_spec``: int32
        [rows], committed tokens; ``token_ids_cpu``: int32 [rows, max_model_len], these tokens.
        """
        if self._is_output_rank is None:
            self._is_output_rank = self._ask_rank()
        if not self._is_output_rank:
            return [[] for _ in sampled_token_ids]
        rows = [
            BatchRow(token_ids_cpu[index, : num_tokens_no_spec[index]], len(new))
            for index, new in enumerate(sampled_token_ids)
        ]
        drafts = [draft.chain() for draft in self._sessions.draft(rows)]
        return [draft if all(token < self._vocab_size for token in draft) else [] for draft in drafts]

    def close(self) -> None:
        """End all sessions."""
        self._sessions.close()


def _options(additional: Any) -> dict[str, Any]:
    options = additional.get("tandem", {}) if isinstance(additional, dict) else {}
    if not isinstance(options, dict):
        raise ValueError(f"additional_config['tandem'] is {options!r}; write an object with options")
    return options


def _is_output_rank() -> bool:
    """Whether this rank's drafts are those that count: the first one of the tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415 (no engine before it is used)

    return bool(get_tensor_model_parallel_rank() == 0)

"""The measured pairs: two sizes of target, three qualities of draft, all made from the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from specdec.settings import ModelSettings, SpeculativeSettings
from tandem.checkpoints import DRAFT, TARGET, find_checkpoint
from tandem.launcher.deployment import Deployment, make_deployment
from tandem.speculative_config import choose_models

TARGETS: Final = ("bundled", "padded")
DRAFTS: Final = ("good", "fair", "bad")
PADDED_SIZE: Final = 200_000_000


def pair(target: str, draft: str, k: int, scratch: Path, **options: Any) -> Deployment:
    """Services for a target of ``TARGETS`` and a draft of ``DRAFTS``; worse drafts are written under ``scratch``.
    ``options``: other settings of the target.
    """
    from benchmarks.degraded_drafts import DEGRADED, degrade_checkpoint  # noqa: PLC0415 (torch)
    from tandem.padding import pad_checkpoint  # noqa: PLC0415 (torch)

    draft_folder, target_folder = Path(find_checkpoint(DRAFT)), find_checkpoint(TARGET)
    if draft in DEGRADED:
        degraded = scratch / draft
        if not degraded.exists():
            degrade_checkpoint(draft_folder, degraded, DEGRADED[draft])
        draft_folder = degraded
    if target == "padded":
        target_folder = pad_checkpoint(target_folder, PADDED_SIZE)
    choice = choose_models(target_folder, SpeculativeSettings(model=str(draft_folder), num_speculative_tokens=k))
    return make_deployment(choice, ModelSettings(model=choice.target, **{"dtype": "float32"} | options))

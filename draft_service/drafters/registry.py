"""Drafters by their methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from draft_service.drafters.base import Drafter
from draft_service.drafters.combined import CombinedDrafter
from draft_service.drafters.lookup.base import LookupDrafter
from specdec.settings import DraftSettings

#: Method to the class that drafts by it, as "module:class". Only classes that need torch import it.
DRAFTERS: Final[dict[str, str]] = {
    "draft_model": "draft_service.drafters.draft_model:ModelDrafter",
    "eagle": "draft_service.drafters.heads.eagle:EagleDrafter",
    "eagle3": "draft_service.drafters.heads.eagle:EagleDrafter",
    "medusa": "draft_service.drafters.heads.medusa:MedusaDrafter",
    "mlp_speculator": "draft_service.drafters.heads.mlp_speculator:MlpDrafter",
    "ngram": "draft_service.drafters.lookup.ngram:NgramDrafter",
    "suffix": "draft_service.drafters.lookup.suffix:SuffixDrafter",
    "none": "draft_service.drafters.none:NoDrafter",
}


def drafter_class(method: str) -> type[Drafter[Any]]:
    """The class that drafts by this method."""
    module, _, name = DRAFTERS[method].partition(":")
    found: type[Drafter[Any]] = getattr(import_module(module), name)
    return found


async def load_drafter(settings: DraftSettings) -> Drafter[Any]:
    """The drafter that ``settings.speculative.method`` names: one, or a lookup and another one combined.

    Raises:
        ModelNotSupported: the checkpoint cannot be run correctly.
        InvalidRequest: a setting does not fit the model or the machine.
    """
    first, *rest = [drafter_class(method) for method in settings.speculative.methods]
    drafter = await first.load(settings)
    if not rest:
        return drafter
    assert isinstance(drafter, LookupDrafter)  # the settings allow no other
    return CombinedDrafter(drafter, await rest[0].load(settings), settings.speculative)

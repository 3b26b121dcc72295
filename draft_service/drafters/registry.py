"""Drafters by their methods."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from draft_service.drafters.base import Drafter
from draft_service.drafters.combined import CombinedDrafter
from draft_service.drafters.lookup import LookupDrafter
from specdec.methods import METHODS, Method
from specdec.settings import DraftSettings

#: Method to the class that drafts by it, or "module:class" of one that is imported when it is needed: some need torch.
DRAFTERS: Final[dict[str, str | type[Drafter[Any]]]] = {
    "draft_model": "draft_service.drafters.draft_model:ModelDrafter",
    "eagle": "draft_service.drafters.heads.eagle:EagleDrafter",
    "eagle3": "draft_service.drafters.heads.eagle:EagleDrafter",
    "dflash": "draft_service.drafters.heads.dflash:DFlashDrafter",
    "dflash2": "draft_service.drafters.heads.dflash:DFlashDrafter",
    "dspark": "draft_service.drafters.heads.dflash:DFlashDrafter",
    "medusa": "draft_service.drafters.heads.medusa:MedusaDrafter",
    "mlp_speculator": "draft_service.drafters.heads.mlp_speculator:MlpDrafter",
    "mtp": "draft_service.drafters.heads.eagle:EagleDrafter",
    "ngram": "draft_service.drafters.lookup:NgramDrafter",
    "suffix": "draft_service.drafters.lookup:SuffixDrafter",
    "none": "draft_service.drafters.none:NoDrafter",
}


def drafter_class(method: str) -> type[Drafter[Any]]:
    """The class that drafts by this method."""
    drafter = DRAFTERS[method]
    if isinstance(drafter, str):
        module, _, name = drafter.partition(":")
        drafter = getattr(import_module(module), name)
    assert isinstance(drafter, type)
    return drafter


def register(method: Method, drafter: type[Drafter[Any]]) -> None:
    """Add a method and the class that drafts by it: settings, command line and service know it from now on."""
    METHODS[method.name] = method
    DRAFTERS[method.name] = drafter


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

"""Drafters that others have and that cannot be run here: each is refused by its name, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from specdec.errors import InvalidRequest, ModelNotSupported

_OTHER_HEAD: Final = "use a head of method eagle3, dflash or dspark that was trained for the target"
#: Method to what it is and what to do.
REFUSED: Final[Mapping[str, str]] = {
    "lilicorr": f"LiLiCorr (a DFlash with an attention over its candidates) cannot be run: {_OTHER_HEAD}",
    "xpress": f"XPress (a DFlash with six passes over its candidates) cannot be run: {_OTHER_HEAD}",
    "domino": f"Domino (a DFlash with a recurrent network over its tokens) cannot be run: {_OTHER_HEAD}",
    "peagle": f"P-EAGLE (an EAGLE-3 head that drafts in parallel) cannot be run: {_OTHER_HEAD}",
    "gemma_assistant": f"Gemma's assistants read the target's keys and values, which stay at the target: {_OTHER_HEAD}",
    "hass": f"HASS heads cannot be run: {_OTHER_HEAD}",
    "hydra": f"Hydra heads cannot be run: {_OTHER_HEAD}",
}
#: Patterns of other names: in ``speculators_model_type``, ``architectures``, ``model_type`` and ``projector_type``.
_NAMES: Final[Mapping[str, str]] = {
    "lilicorr": "lilicorr",
    "xpress": "xpress",
    "domino": "domino",
    "peagle": r"\bp-?eagle",
    "gemma_assistant": r"gemma\d*_?(assistant|mtp)",
    "hass": r"\bhass",
    "hydra": "hydra",
}
#: How fields begin that only these configs have.
_FIELDS: Final[Mapping[str, str]] = {"lilicorr_": "lilicorr", "xpress_": "xpress", "hydra_": "hydra"}


def refuse_method(name: str) -> None:
    """Refuse a drafter by the name of its method.

    Raises:
        InvalidRequest: it is one of :data:`REFUSED`.
    """
    bare = re.sub("[-_]", "", name.lower())
    for method, sentence in REFUSED.items():
        if bare == method.replace("_", ""):
            raise InvalidRequest(f'method "{name}": {sentence}', param="method")


def refuse_config(config: Mapping[str, Any]) -> None:
    """Refuse a drafter by its ``config.json``.

    Raises:
        ModelNotSupported: it is one of :data:`REFUSED`.
    """
    inner = config.get("dflash_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    names = [str(part.get(field, "")) for part in parts for field in ("speculators_model_type", "projector_type")]
    names += [str(config.get("model_type", "")), *map(str, config.get("architectures") or ())]
    found = [
        *(method for method, pattern in _NAMES.items() if any(re.search(pattern, name.lower()) for name in names)),
        *(method for start, method in _FIELDS.items() for part in parts if any(key.startswith(start) for key in part)),
        *(["peagle"] if config.get("parallel_drafting") and any("eagle" in name.lower() for name in names) else []),
    ]
    if found:
        raise ModelNotSupported(REFUSED[found[0]])

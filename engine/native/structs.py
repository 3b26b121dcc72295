"""The structs that the C++ kernels share with Python, compared with C++ when the library is loaded.

The C++ definitions say what each field means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

from engine.native.draft_structs import CChain, CDrafted, CMlp, CMlpStep, CWalk
from engine.native.model_structs import (
    CAttentionShape,
    CBatch,
    CFeed,
    CGroupedSource,
    CHead,
    CKept,
    CLayer,
    CLinear,
    CMixer,
    CModel,
    CPlan,
)
from engine.native.sampling_structs import CDecision, CDraftPlace, CEdits, CRound, CSampler, CTreePlace

#: By their names in C++.
STRUCTS: Final[Mapping[str, type[ctypes.Structure]]] = {
    "Plan": CPlan,
    "AttentionShape": CAttentionShape,
    "GroupedSource": CGroupedSource,
    "Linear": CLinear,
    "Mixer": CMixer,
    "Layer": CLayer,
    "Head": CHead,
    "Model": CModel,
    "Batch": CBatch,
    "Feed": CFeed,
    "Kept": CKept,
    "Edits": CEdits,
    "Sampler": CSampler,
    "DraftPlace": CDraftPlace,
    "TreePlace": CTreePlace,
    "Chain": CChain,
    "Drafted": CDrafted,
    "Round": CRound,
    "Decision": CDecision,
    "MlpStep": CMlpStep,
    "Mlp": CMlp,
    "Walk": CWalk,
}

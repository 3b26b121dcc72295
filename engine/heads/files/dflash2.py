"""Files of DFlash2 heads: those of z-lab and those of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from engine.heads.dflash2 import DFlash2Config, DFlash2Head
from engine.heads.files.dflash import dflash_config_of, dflash_tensors_of, load_dflash, read_fields
from engine.heads.files.head_format import HeadFormat
from engine.heads.files.tensors import TargetTensors

_SIZES: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def read_dflash2(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors
) -> DFlash2Head:
    """A DFlash2 head.

    Raises:
        ModelNotSupported: a variant that is not known; the text names the field or tensor.
    """
    fields, options = read_fields(folder, config, tensors, target, predicts_next=False, sees_all=True)
    sizes: dict[str, Any] = {name: fields.number(name) for name in _SIZES}
    fields.finish()
    size, vocab_size = options["layer"].hidden_size, options["vocab_size"]
    if options["draft_vocab_size"] != vocab_size:
        raise fields.refusal("draft_vocab_size", f"a DFlash2 drafts all of the target's {vocab_size} tokens")
    if size % sizes["conv_group_size"]:
        raise fields.refusal("conv_group_size", f"it must divide hidden_size, {size}")
    if sizes["selector_top_k"] > vocab_size:
        raise fields.refusal("selector_top_k", f"the target has {vocab_size} tokens")
    for name in [name for name in tensors if name.endswith("_codebook.weight")]:
        tensors[name.removesuffix(".weight")] = tensors.pop(name)
    head = load_dflash(DFlash2Head, DFlash2Config(**options, **sizes), fields, tensors, target)
    assert isinstance(head, DFlash2Head)
    return head


def dflash2_config_of(head: DFlash2Head) -> dict[str, Any]:
    """The ``config.json`` of a head, as z-lab writes it."""
    config = dflash_config_of(head)
    sizes = {name: getattr(head.config, name) for name in _SIZES}
    return config | {"architectures": ["DFlash2DraftModel"], "dflash_config": config["dflash_config"] | sizes}


FORMAT: Final = HeadFormat(read=read_dflash2, config_of=dflash2_config_of, tensors_of=dflash_tensors_of)

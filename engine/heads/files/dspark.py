"""Files of DSpark heads: those of DeepSpec and those of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from engine.heads.dspark import MARKOV_TYPES, DSparkConfig, DSparkHead
from engine.heads.files.dflash import block_fields_of, dflash_tensors_of, load_dflash, read_fields
from engine.heads.files.head_format import HeadFormat
from engine.heads.files.tensors import TargetTensors


def read_dspark(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetTensors
) -> DSparkHead:
    """A DSpark head.

    Raises:
        ModelNotSupported: a variant that is not known; the text names the field or tensor.
    """
    fields, options = read_fields(folder, config, tensors, target, predicts_next=True)
    rank = fields.take("markov_rank", _width(tensors, "markov_head.markov_w1.weight"))
    if not isinstance(rank, int) or rank < 0:
        raise fields.refusal("markov_rank", "a whole number, 0 or more, is needed")
    kind = fields.take("markov_head_type", MARKOV_TYPES[0])
    if rank and kind not in MARKOV_TYPES:
        raise fields.refusal("markov_head_type", f"only {', '.join(MARKOV_TYPES)} can be run")
    width = _width(tensors, "confidence_head.proj.weight")
    has_confidence = bool(fields.take("enable_confidence_head", width > 0))
    reads_token = bool(fields.take("confidence_head_with_markov", width > options["layer"].hidden_size))
    if has_confidence and reads_token and not rank:
        raise fields.refusal("confidence_head_with_markov", "markov_rank is 0, so there is no token to read")
    fields.finish()
    spark = DSparkConfig(
        **options,
        markov_rank=rank,
        markov_type=str(kind),
        has_confidence=has_confidence,
        confidence_reads_token=reads_token,
        markov_bias=any(f"markov_head.{name}_proj.bias" in tensors for name in ("gate", "joint")),
    )
    head = load_dflash(DSparkHead, spark, fields, tensors, target)
    assert isinstance(head, DSparkHead)
    return head


def dspark_config_of(head: DSparkHead) -> dict[str, Any]:
    """The ``config.json`` of a head, as DeepSpec writes it."""
    config = head.config
    return {
        "architectures": ["Qwen3DSparkModel"],
        **block_fields_of(config),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [i - 1 for i in config.hidden_state_layers],
        "sample_from_anchor": config.predicts_next,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_type,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token,
    }


def _width(tensors: Mapping[str, Tensor], name: str) -> int:
    """Columns of a tensor; 0: it is not there."""
    return tensors[name].shape[1] if name in tensors else 0


FORMAT: Final = HeadFormat(read=read_dspark, config_of=dspark_config_of, tensors_of=dflash_tensors_of)

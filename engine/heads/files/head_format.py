"""How heads of one method are read from files and written to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from engine.heads.files.tensors import TargetTensors, read_tensors
from engine.heads.head import DraftHead

D = TypeVar("D", bound=DraftHead)


def all_tensors(head: DraftHead) -> dict[str, Tensor]:
    """The head's tensors, except those that are the target's."""
    return {name: tensor for name, tensor in head.state_dict().items() if name not in head.shared_names}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFormat(Generic[D]):
    """The files of one kind of head."""

    #: From the folder, its config and its tensors: the head, with what it shares with the target. Raises
    #: ModelNotSupported for a variant that is not known; the text names the field or tensor.
    read: Callable[[Path, Mapping[str, Any], dict[str, Tensor], TargetTensors], D]
    #: The ``config.json`` of a head; None: such files are not written.
    config_of: Callable[[D], dict[str, Any]] | None = None
    #: The tensors of a folder that ``read`` gets.
    read_tensors: Callable[[Path], dict[str, Tensor]] = read_tensors
    #: The tensors to write, by their names in the file.
    tensors_of: Callable[[D], dict[str, Tensor]] = all_tensors
    #: Name of the file with the tensors.
    file: str = "model.safetensors"

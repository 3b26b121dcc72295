"""The types in which hidden states of the target travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Bytes of an element, by the element types of a message.
ELEMENT_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}
#: Bytes of the scale of a group of int8 elements.
SCALE_BYTES: Final = 4
#: What a session may ask for, and how many numbers share a scale; 0: all of one state; None: the numbers have none.
STATE_DTYPES: Final[Mapping[str, int | None]] = {"int8": 0, "int8_g32": 32, "bfloat16": None}

"""Types of the fields of structs. Pointers are addresses of arrays; lengths count elements."""

from __future__ import annotations

import ctypes

Pointer = ctypes.c_void_p
Int64 = ctypes.c_int64
Int32 = ctypes.c_int32

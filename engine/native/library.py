"""The C++ kernels beside this file: prebuilt in a wheel, else compiled once, and called through ctypes.

The kernels have a plain C interface and include no torch headers, so building takes seconds; see
:mod:`specdec.prebuilt` and :mod:`specdec.compiler`. ctypes releases the GIL during a call.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from pathlib import Path
from typing import Final

import torch

from engine.native.model_structs import CAttentionShape, CPlan
from engine.native.structs import STRUCTS
from specdec.compiler import BuildError
from specdec.prebuilt import library_of
from specdec.struct_check import check_structs

logger = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent

#: Of activations and caches; of weights, where two that no other weight has stand for grouped ones
#: (:mod:`engine.grouped_weight`).
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
GROUPED: Final = (torch.uint8, torch.uint16)
WEIGHT_DTYPES: Final = {**DTYPES, torch.int8: 2, GROUPED[0]: 3, GROUPED[1]: 4}

_Pointer = ctypes.c_void_p
_Int64 = ctypes.c_int64
_Int = ctypes.c_int


class Memory:
    """Memory for packed weights, in huge pages where the system has them; freed with the object."""

    def __init__(self, library: NativeLibrary, num_bytes: int) -> None:
        address = library.alloc(max(num_bytes, 1))
        if not address:
            raise MemoryError(f"{num_bytes} bytes for packed weights")
        self.address: int = address
        self.num_bytes = num_bytes
        self._taken = 0
        # Not at exit: a daemon thread may still be in the middle of a pass then.
        weakref.finalize(self, library.free, address).atexit = False

    def take(self, num_bytes: int) -> int:
        """The address of the next ``num_bytes`` bytes, aligned to a page."""
        at = self._taken
        self._taken = at + page_aligned(num_bytes)
        assert at + num_bytes <= self.num_bytes
        return self.address + at


def page_aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // 4096) * 4096


class NativeLibrary:
    """The loaded kernels. Addresses are integers; see the C++ files for what each function does."""

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            StructMismatch: a struct is not laid out as in :mod:`engine.native.structs`.
            OSError: it cannot be loaded.
            AttributeError: it lacks a function.
        """
        self.path = path
        lib = ctypes.CDLL(str(path))
        check_structs(lib, STRUCTS)
        self.alloc = lib.tandem_alloc
        self.alloc.argtypes, self.alloc.restype = (_Int64,), _Pointer
        self.free = lib.tandem_free
        self.free.argtypes, self.free.restype = (_Pointer,), None
        self.packed_bytes = lib.tandem_packed_bytes
        self.packed_bytes.argtypes, self.packed_bytes.restype = (_Int, _Int64, _Int64), _Int64
        self.pack = lib.tandem_pack
        self.pack.argtypes = (_Int, _Pointer, _Pointer, _Int64, _Int64, _Int64, _Pointer, _Int64, _Int64, _Int)
        self.pack.restype = None
        self.grouped_panel_bytes = lib.tandem_grouped_panel_bytes
        self.grouped_panel_bytes.argtypes, self.grouped_panel_bytes.restype = (_Pointer,), _Int64
        self.pack_grouped = lib.tandem_pack_grouped
        self.pack_grouped.argtypes = (_Pointer, _Pointer, _Int64, _Pointer, _Int64, _Int64, _Int)
        self.pack_grouped.restype = None
        self.ask_for_amx = lib.tandem_ask_for_amx
        self.use_amx = lib.tandem_use_amx
        self.use_amx.argtypes, self.use_amx.restype = (_Pointer, _Int64, _Int), None
        self.linear = lib.tandem_linear
        self.linear.argtypes = (
            *(_Int, _Int, _Pointer, _Int, _Int64, _Int64, _Pointer, _Int64),
            *(_Pointer, _Pointer, _Int64, _Int64, _Int64, _Int),
        )
        self.attention = lib.tandem_attention
        self.attention.argtypes = (
            *(ctypes.POINTER(CPlan), ctypes.POINTER(CAttentionShape), _Int, _Int),
            *(_Pointer, _Int64, _Int64, _Pointer, _Pointer, _Pointer, _Int),
        )
        self.write_rows = lib.tandem_write_rows
        self.write_rows.argtypes = (
            *(_Int, _Pointer, _Int64, _Int64, _Int64, _Int, _Int),
            *(_Pointer, _Int64, _Int64, _Pointer),
        )
        self.write_rows.restype = None
        self.decoder_forward = lib.tandem_decoder_forward
        self.decoder_forward.argtypes = (_Pointer, _Pointer, _Int)
        self.feed = lib.tandem_feed
        self.feed.argtypes = (_Pointer, _Pointer, _Pointer, _Int64, _Pointer, _Int)
        self.keep_rows = lib.tandem_keep_rows
        self.keep_rows.argtypes, self.keep_rows.restype = (_Pointer, _Pointer, _Pointer, _Int64), None
        self.draft_chains = lib.tandem_draft_chains
        self.draft_chains.argtypes = (_Pointer, _Pointer, _Pointer, _Int64, _Pointer, _Pointer, _Int)
        self.draft_mlp = lib.tandem_draft_mlp
        self.draft_mlp.argtypes = (_Pointer, _Pointer, _Int64, _Pointer, _Pointer, _Int)
        self.draft_walk = lib.tandem_draft_walk
        self.draft_walk.argtypes = (_Pointer, _Pointer, _Int64, _Pointer, _Pointer, _Int)
        self.likeliest = lib.tandem_likeliest
        self.likeliest.argtypes = (_Pointer, _Int64, _Int64, _Pointer, _Pointer, _Pointer, _Int64, _Pointer, _Pointer)
        self.verify_rounds = lib.tandem_verify_rounds
        self.verify_rounds.argtypes = (_Pointer, _Int64, _Pointer, _Int64, _Pointer, _Int)
        self.check_draft = lib.tandem_check_draft
        self.check_draft.argtypes = (_Pointer, _Int64, ctypes.c_char_p, _Pointer, _Int64)
        self.check_draft.restype = _Int64
        #: Columns of a panel.
        self.panel: int = lib.tandem_panel()
        #: Positions that are attended to together.
        self.key_tile: int = lib.tandem_key_tile()
        self._add_recurrences(lib)

    def _add_recurrences(self, lib: ctypes.CDLL) -> None:
        self.convolve = lib.tandem_convolve
        self.convolve.argtypes = (
            *(_Int, _Pointer, _Int64, _Int64, _Int64, _Pointer, _Pointer, _Int),
            *(_Pointer, _Int64, _Pointer, _Int64, _Pointer, _Int),
        )
        self.convolve.restype = None
        self.delta_rule = lib.tandem_delta_rule
        self.delta_rule.argtypes = (
            *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int64, _Int64, _Int64, _Int64, _Int, _Int),
            *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int64, _Int64, _Pointer, _Int),
        )
        self.mamba2 = lib.tandem_mamba2
        self.mamba2.argtypes = (
            *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int64, _Int64, _Int64, _Int64),
            *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int64, _Int64, _Pointer, _Int),
        )
        self.elementwise = lib.tandem_elementwise
        self.elementwise.argtypes, self.elementwise.restype = (_Int, _Int, _Pointer, _Pointer, _Int64, _Int), None
        self.mamba = lib.tandem_mamba
        self.mamba.argtypes = (
            *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int64, _Int64),
            *(_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int64, _Int64, _Pointer, _Int),
        )


_lock = threading.Lock()
_loaded: list[NativeLibrary | None] = []


def load() -> NativeLibrary | None:
    """The kernels, prebuilt or compiled on the first call; None where that fails (logged once, with the reason)."""
    with _lock:
        if not _loaded:
            try:
                _loaded.append(NativeLibrary(library_of(SOURCES, "kernels")))
            except (BuildError, OSError, AttributeError) as error:
                logger.warning("CPU kernels are not used, the slower torch path is: %s", error)
                _loaded.append(None)
        return _loaded[0]


def loaded() -> NativeLibrary:
    """The kernels.

    Raises:
        NotImplementedError: :func:`load` has none.
    """
    library = load()
    if library is None:
        raise NotImplementedError("the native kernels are not available on this machine")
    return library

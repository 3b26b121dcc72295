"""Compiling the C++ kernels beside this file with the system's compiler, once, and calling them through ctypes.

The kernels have a plain C interface and include no torch headers, so building takes seconds. The library goes to
``$XDG_CACHE_HOME/tandem`` (``~/.cache/tandem``) under a name made of everything that went into it: sources, flags,
compiler and processor. ctypes releases the GIL during a call.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from specdec.engine.plan import BatchPlan

logger = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent
#: Contraction is off because it would leave to the compiler which products are fused: see vector.h.
FLAGS: Final = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
#: Tried in this order: x86 and most compilers, older ARM compilers, any.
MACHINE_FLAGS: Final = (("-march=native",), ("-mcpu=native",), ())
BUILD_TIMEOUT_S: Final = 300

#: Of activations and caches, and of weights.
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
WEIGHT_DTYPES: Final = {**DTYPES, torch.int8: 2}

_Pointer = ctypes.c_void_p
_Int64 = ctypes.c_int64
_Int = ctypes.c_int


class CPlan(ctypes.Structure):
    """``Plan`` of attention.h."""

    _fields_ = (
        ("positions", _Pointer),
        ("slots", _Pointer),
        ("row_starts", _Pointer),
        ("block_tables", _Pointer),
        ("num_rows", _Int64),
        ("num_sequences", _Int64),
        ("table_width", _Int64),
        ("block_size", _Int64),
    )

    @classmethod
    def of(cls, plan: BatchPlan) -> CPlan:
        """Pointers into a plan's tensors, which must outlive it."""
        return cls(
            plan.positions.data_ptr(),
            plan.slots.data_ptr(),
            plan.row_starts.data_ptr(),
            plan.block_tables.data_ptr(),
            plan.positions.shape[0],
            plan.kv_lens.shape[0],
            plan.block_tables.shape[1],
            plan.block_size,
        )


class CAttentionShape(ctypes.Structure):
    """``AttentionShape`` of attention.h."""

    _fields_ = (
        ("heads", _Int),
        ("kv_heads", _Int),
        ("head_dim", _Int),
        ("value_dim", _Int),
        ("k_block_stride", _Int64),
        ("v_block_stride", _Int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", _Int64),
        ("keys_in_columns", _Int64),
    )


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
    """The compiled kernels. Addresses are integers; see the C++ files for what each function does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lib = ctypes.CDLL(str(path))
        self.alloc = lib.tandem_alloc
        self.alloc.argtypes, self.alloc.restype = (_Int64,), _Pointer
        self.free = lib.tandem_free
        self.free.argtypes, self.free.restype = (_Pointer,), None
        self.packed_bytes = lib.tandem_packed_bytes
        self.packed_bytes.argtypes, self.packed_bytes.restype = (_Int, _Int64, _Int64), _Int64
        self.pack = lib.tandem_pack
        self.pack.argtypes = (_Int, _Pointer, _Pointer, _Int64, _Int64, _Int64, _Pointer, _Int64, _Int64, _Int)
        self.pack.restype = None
        self.linear = lib.tandem_linear
        self.linear.argtypes = (
            *(_Int, _Int, _Pointer, _Int, _Int64, _Int64, _Pointer, _Int64),
            *(_Pointer, _Pointer, _Int64, _Int64, _Int),
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
        self.draft_chains = lib.tandem_draft_chains
        self.draft_chains.argtypes = (_Pointer, _Pointer, _Pointer, _Int64, _Pointer, _Pointer, _Int)
        self.draft_rows = lib.tandem_draft_rows
        self.draft_rows.argtypes = (_Pointer, _Int64, _Int64, _Pointer, _Pointer, _Pointer, _Pointer)
        self.verify_rounds = lib.tandem_verify_rounds
        self.verify_rounds.argtypes = (_Pointer, _Int64, _Pointer, _Int64, _Pointer, _Int)
        self.check_draft = lib.tandem_check_draft
        self.check_draft.argtypes = (_Pointer, _Int64, ctypes.c_char_p, _Pointer, _Int64)
        self.check_draft.restype = _Int64
        #: Columns of a panel.
        self.panel: int = lib.tandem_panel()


_lock = threading.Lock()
_loaded: list[NativeLibrary | None] = []


def load() -> NativeLibrary | None:
    """The kernels, compiled on the first call on this machine; None where that fails (logged once, with the reason)."""
    with _lock:
        if not _loaded:
            try:
                _loaded.append(NativeLibrary(build()))
            except (BuildError, OSError, AttributeError) as error:
                logger.warning("CPU kernels are not used, the slower torch path is: %s", error)
                _loaded.append(None)
        return _loaded[0]


class BuildError(Exception):
    """The kernels cannot be compiled here; the text says why and what to do."""


def build() -> Path:
    """The compiled library, from the cache or made now; safe for several processes at once.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = _find_compiler()
    version = _run([*compiler, "--version"]).stdout
    cache, folder = _cache_folder(), None
    failure = ""
    for machine in MACHINE_FLAGS:
        name = f"kernels-{_key(compiler, version, machine)}.so"
        if (cache / name).is_file():
            return cache / name
        folder = folder or _made_writable(cache)
        path = folder / name
        with _only_one(path.with_suffix(".lock")):
            if path.is_file():  # another process was faster
                return path
            failure = _compile(compiler, machine, path)
        if not failure:
            return path
    raise BuildError(f"{shlex.join(compiler)} failed (set CXX to another compiler): {failure}")


def _find_compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [named] if named else ["g++", "clang++", "c++"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]) is not None:
            return words
    if named:
        raise BuildError(f"CXX is {named!r}, which is not there; unset it or name a C++ compiler")
    raise BuildError("there is no C++ compiler; install g++ or clang++, or name one with CXX")


def _key(compiler: list[str], version: str, machine: tuple[str, ...]) -> str:
    """A name for everything that goes into the library."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for text in (*compiler, version, *FLAGS, *machine, *_processor()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _processor() -> list[str]:
    """Model and abilities of the processor: a folder shared by several machines holds a library for each kind."""
    found = [platform.machine(), platform.system()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [*found, platform.processor()]
    for wanted in ("model name", "flags", "Features", "CPU part"):
        found.extend(next(([line] for line in lines if line.startswith(wanted)), []))
    return found


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tandem"


def _made_writable(cache: Path) -> Path:
    """The cache folder, or one for this process alone where that cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix="tandem-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    logger.warning("%s cannot be written: CPU kernels are compiled to %s at every start", cache, temporary)
    return Path(temporary)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock that other processes respect and that dies with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], machine: tuple[str, ...], path: Path) -> str:
    """Compile every source at once, link, and move the result into place; the compiler's complaint, or ""."""
    sources = sorted(SOURCES.glob("*.cpp"))
    flags = [flag for flag in (*FLAGS, *machine) if flag != "-shared"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        jobs = [
            subprocess.Popen(
                [*compiler, *flags, "-c", str(source), "-o", made], stderr=subprocess.PIPE, text=True, errors="replace"
            )
            for source, made in zip(sources, objects, strict=True)
        ]
        try:
            complaints = [job.communicate(timeout=BUILD_TIMEOUT_S)[1] for job in jobs]
        except subprocess.TimeoutExpired:
            return f"not done after {BUILD_TIMEOUT_S} s"
        finally:
            for job in jobs:
                if job.poll() is None:
                    job.kill()
                    job.wait()
                assert job.stderr is not None
                job.stderr.close()
        for job, complaint in zip(jobs, complaints, strict=True):
            if job.returncode != 0:
                return complaint.strip()[-500:]
        made = os.path.join(folder, path.name)
        linked = _run([*compiler, *FLAGS, *machine, *objects, "-o", made])
        if linked.returncode != 0:
            return linked.stderr.strip()[-500:]
        os.replace(made, path)
    return ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command[:1])} cannot be run: {error}") from error

"""For all tests: Triton's kernels run in its interpreter where there is no GPU to compile them for."""

from __future__ import annotations

import os

import torch

# Read when a kernel is defined, so it must stand before any import of triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

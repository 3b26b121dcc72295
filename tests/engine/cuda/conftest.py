"""Without a GPU the kernels run in Triton's interpreter, where a long text of the self-check takes seconds a model."""

from __future__ import annotations

import pytest
import torch

from engine.cuda import graphs
from engine.loading import kernel_check, self_check


@pytest.fixture(autouse=True)
def captures() -> None:
    """Whatever model this thread loaded before."""
    graphs.set_eager(False)


@pytest.fixture(autouse=True)
def short_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks without long texts, which ``tests/engine/test_refusals.py`` and ``test_kernel_check.py`` cover."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(self_check, "reach", lambda *args, **options: 0)
        monkeypatch.setattr(kernel_check, "LONG", 12)

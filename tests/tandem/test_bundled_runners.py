"""The bundled models run on the native decoder: with another runner they would be right, and slow."""

from __future__ import annotations

import pytest

from engine.loading.load import load_engine
from specdec.settings import ModelSettings
from tandem.checkpoints import DRAFT, TARGET, find_checkpoint


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_a_bundled_model_runs_on_the_native_decoder(name: str) -> None:
    settings = ModelSettings(model=find_checkpoint(name), device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 24)
    engine = load_engine(settings)
    try:
        assert engine.runner.name == "native decoder"
    finally:
        engine.close()

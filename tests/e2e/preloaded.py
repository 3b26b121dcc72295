"""What the process imports that services are forked from. None of it starts threads, which a fork would lose."""

import importlib

import tests.one_thread  # noqa: F401 - before the engine is imported
from specdec.process.imports import large_imports

#: What takes seconds to import.
MODULES = (
    "target_service.core",
    "draft_service.core",
    "draft_service.servicer",
    "target_service.servicer",
    "engine.loading.load",
    "transformers.models.llama.modeling_llama",
    "specdec.rpc.core_service",
    "gateway.app",
    "gateway.backends.target",
    "gateway.backends.draft",
)

with large_imports():
    for module in MODULES:
        importlib.import_module(module)

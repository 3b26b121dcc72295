"""Options that were given and have no effect beside the others."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.settings.option import options_of
from tandem.launcher.deployment import Deployment, is_on_gpu

#: Of the gateway: what they are for.
_OF_ORIGINS = ("allowed_methods", "allowed_headers", "allow_credentials")
_OF_SPECULATION = ("verification", "fixed_draft_length")


def without_effect(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Each option whose value is not the default and changes nothing, and why."""
    gateway, model, scheduler = deployment.gateway, deployment.target.model, deployment.target.scheduler
    reasons: dict[str, str] = {}
    if not gateway.allowed_origins:
        reasons |= dict.fromkeys(_OF_ORIGINS, "no web page may use the API without --allowed-origins")
    if not gateway.num_speculative_tokens:
        reasons |= dict.fromkeys(_OF_SPECULATION, "nothing drafts; give --speculative-config")
    if deployment.draft is None:
        reasons["draft_timeout_s"] = "there is no draft service"
    if is_on_gpu(model):
        reasons |= dict.fromkeys(("cpu_kv_cache_share", "autotune"), "the model runs on a GPU")
    else:
        remedy = "--cpu-kv-cache-share and --kv-cache-memory-bytes set the size of the KV cache"
        reasons["gpu_memory_utilization"] = f"the model runs on a CPU; {remedy}"
    if model.kv_cache_memory_bytes is not None:
        reasons["cpu_kv_cache_share"] = "--kv-cache-memory-bytes sets the size of the KV cache"
    if model.tensor_parallel_size == 1:
        reasons["tensor_parallel_timeout_s"] = "there is one rank"
    for settings in (model, scheduler, gateway):
        for name, option in options_of(type(settings)).items():
            if name in reasons and getattr(settings, name) != option.default:
                yield name, reasons[name]

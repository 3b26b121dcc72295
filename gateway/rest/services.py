"""``GET /services``: which targets and drafts there are, whether they can be used, and how full they are."""

from __future__ import annotations

from typing import Any

from gateway.generation import Generation
from gateway.placement.routing import Replica


def describe_services(generation: Generation) -> dict[str, Any]:
    """The answer; loads are those of the latest second."""
    router, settings = generation.router, generation.settings
    return {
        "model": next(iter(generation.model_names), ""),
        "num_speculative_tokens": 0 if settings.has_engines else settings.num_speculative_tokens,
        "num_running": generation.num_running,
        "num_waiting": generation.num_waiting,
        "targets": [_describe(target) | {"kv_use": min(1.0, target.kv_use)} for target in router.targets.replicas],
        "drafts": [
            _describe(draft) | {"method": draft.info.method if draft.info else "", "busy_share": draft.busy_share}
            for draft in router.drafts.replicas
        ],
        "lookups": list(settings.lookup),
        "methods": [
            {"name": name, "num_speculative_tokens": method.max_tokens}
            for name, method in generation.draft_methods.offered.items()
        ],
    }


def _describe(replica: Replica[Any]) -> dict[str, Any]:
    return {
        "name": replica.name,
        "status": "up" if replica.usable else "down",
        "reason": replica.reason,
        "model": replica.info.name if replica.info else "",
        "num_sessions": replica.load.open_sessions,
        "num_waiting_sessions": replica.load.waiting_sessions,
    }

"""The PromQL of deploy/observability: of the dashboard's panels and of the alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "observability"
ALERTS: Final = FOLDER / "alerts.yml"
#: What Grafana puts in place of its variables.
VARIABLES: Final = {"$__rate_interval": "1m", "$model": ".*"}
#: The comparison that makes an alert of a value.
_COMPARISON: Final = re.compile(r"\s(?:==|<|>)\s[\d.]+.*", re.DOTALL)


def dashboard() -> Any:
    return json.loads((FOLDER / "dashboards" / "tandem.json").read_text())


def panel_queries() -> Iterator[tuple[str, str]]:
    """The title of each panel, and each of its queries."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in VARIABLES.items():
                query = query.replace(variable, value)
            yield panel["title"], query


def alert_queries() -> Iterator[tuple[str, str]]:
    """The name of each alert, and the value that it compares: the alert itself has no data while all is well."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            value, num_comparisons = _COMPARISON.subn("", rule["expr"])
            assert num_comparisons == 1, rule["alert"]
            yield rule["alert"], value

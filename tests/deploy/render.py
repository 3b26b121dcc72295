"""Render the Helm chart with Helm's own library for the tests: ``make chart``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "tandem"
RENDERED: Final = Path(__file__).with_name("rendered")
PEER: Final = {"podSelector": {"matchLabels": {"app": "other"}}}
#: What is rendered, by name.
CASES: Final[dict[str, dict[str, Any]]] = {
    "keys": {"gateway": {"keysSecret": "tandem-keys"}},
    # No certificates, no keys, no draft.
    "plain": {
        "tls": {"enabled": False},
        "gateway": {"insecure": True},
        "model": {"draft": "", "numSpeculativeTokens": 0},
        "networkPolicies": {"enabled": False},
    },
    "traces": {
        "gateway": {"insecure": True},
        "tracing": {"endpoint": "https://collector.observability:4317"},
    },
    # Every option has a value of its own; each copy of the target has eight devices in two pods.
    "everything": {
        "image": {"repository": "registry.example/tandem", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "model": {
            "target": "/models/big",
            "draft": "/models/small",
            "numSpeculativeTokens": 7,
            "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "fromHub": True,
        },
        "tracing": {
            "endpoint": "http://collector:14317",
            "egress": [{"to": [PEER], "ports": [{"port": 4317}]}],
        },
        "gateway": {
            "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "cpuUtilization": 50},
            "keysSecret": "tandem-keys",
            "tlsSecret": "tandem-public-tls",
            "serviceType": "LoadBalancer",
            "serviceAnnotations": {"example/internal": "true"},
            "clients": [PEER],
            "drainSeconds": 600,
            "args": ["--lookup=suffix"],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "podAnnotations": {"prometheus.io/scrape": "true"},
            "nodeSelector": {"pool": "cpu"},
        },
        "target": {
            "replicas": 2,
            "gpusPerPod": 4,
            "tensorParallel": {"size": 8, "pods": 2},
            "sharedMemory": "8Gi",
            "args": ["--max-num-seqs=64"],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "podAnnotations": {"example/note": "big"},
            "nodeSelector": {"gpu": "large"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
        },
        "draft": {
            "gpusPerPod": 1,
            "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 4, "busyShare": 0.5},
            "engines": [PEER],
            "args": ["--tree-top-k=4"],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        },
        "inferencePool": {"enabled": True, "endpointPicker": "tandem-epp"},
    },
}


def header() -> str:
    """The first line of a rendered file: which chart it was made from, and of which cases."""
    digest = hashlib.sha256(repr(CASES).encode())
    for path in sorted(CHART.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(CHART).as_posix().encode() + b"\0" + path.read_bytes())
    return f"# By `make chart` from {CHART.relative_to(ROOT)}, {digest.hexdigest()[:16]}."


def main() -> None:
    """Write the rendered files."""
    import helm_python  # type: ignore[import-not-found]

    with helm_python.Chart.load(str(CHART)) as chart:
        for name, values in CASES.items():
            texts = chart.render(values, name="tandem", namespace="serving")
            objects = [text.strip() for path, text in sorted(texts.items()) if path.endswith(".yaml") and text.strip()]
            (RENDERED / f"{name}.yaml").write_text("\n---\n".join((header(), *objects)) + "\n")


if __name__ == "__main__":
    main()

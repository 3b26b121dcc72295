"""The Helm chart, as Helm renders it: valid for Kubernetes, flags that the services take, nothing more than needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml

import draft_service.main
import gateway.main
import target_service.main
from specdec.flags import Parser
from tests.deploy.render import CASES, CHART, PEER, RENDERED, header

#: The oldest version that Chart.yaml allows. Later ones take what it takes: nothing here is alpha or beta.
KUBERNETES: Final = "1.30"
#: Of Gateway API Inference Extension, which has no schema in the package.
INFERENCE_POOL: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["number"],
                "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
            },
        },
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "port": {"type": "object", "required": ["number"]},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
SERVICES: Final = {"gateway": gateway.main, "target": target_service.main, "draft": draft_service.main}


@cache
def objects_of(case: str) -> tuple[dict[str, Any], ...]:
    return tuple(yaml.load_all((RENDERED / f"{case}.yaml").read_text(), yaml.CSafeLoader))


def of_kind(case: str, *kinds: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects_of(case) if each["kind"] in kinds}


def workloads(case: str) -> dict[str, dict[str, Any]]:
    return of_kind(case, "Deployment", "StatefulSet")


def pods(case: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The service, the pod and the container of each workload."""
    for workload in workloads(case).values():
        pod = workload["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        yield container["name"], pod, container


def settings_of(service: str, container: dict[str, Any]) -> tuple[Any, Any]:
    """What the service makes of its flags: its settings and those of its server."""
    args = container["args"]
    if "command" in container:
        assert container["command"][-1] == "target_service"
    else:
        assert args[0] == service
        args = args[1:]
    parser = Parser(service)
    module = SERVICES[service]
    module.add_arguments(parser)
    settings = module.settings_of(parser.parse_args(args))
    return settings if isinstance(settings, tuple) else (settings, settings)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_is_rendered_is_the_chart(case: str) -> None:
    assert (RENDERED / f"{case}.yaml").read_text().startswith(header() + "\n"), "run `make chart`"


def test_kubernetes_takes_every_object(case: str) -> None:
    for each in objects_of(case):
        if each["kind"] == "InferencePool":
            assert each["apiVersion"] == "inference.networking.k8s.io/v1"
            jsonschema.validate(each["spec"], INFERENCE_POOL)
        else:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_schemas_find_mistakes() -> None:
    workload = deepcopy(workloads("keys")["tandem-target"])
    workload["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, KUBERNETES, strict=True)


def test_the_services_take_their_flags_and_can_find_each_other(case: str) -> None:
    services = of_kind(case, "Service")
    for service, pod, container in pods(case):
        settings, server = settings_of(service, container)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        for tls in (server.tls, getattr(settings, "backend_tls", server.tls)):
            for path in tls.paths:
                volume = volumes[mounts[path.rpartition("/")[0]]["name"]]
                assert volume["secret"]["secretName"]
        if service == "gateway":
            assert settings.published_host is None
            for address, role in zip((*settings.targets, *settings.drafts), ("target", "draft"), strict=False):
                name, _, port = address.removeprefix("dns:///").partition(":")
                found = services[name]["spec"]
                assert found["clusterIP"] == "None"
                assert found["ports"][0]["port"] == int(port)
                peers = [other for each, other, _ in pods(case) if each == role]
                wanted = dict(found["selector"])
                wanted.pop("apps.kubernetes.io/pod-index", None)  # Kubernetes sets it
                assert peers
                assert all(selects(wanted, peer["metadata"]["labels"]) for peer in peers)
        else:
            (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == "grpc")
            assert (server.host, server.port) == ("0.0.0.0", port)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                check = container[probe]
                if "exec" in check:  # ranks above 0 have no port
                    assert f"--grpc 127.0.0.1:{server.health_port}" in check["exec"]["command"][-1]
                else:
                    assert check["grpc"]["port"] == server.health_port
        # The drain must end before the kubelet kills what is left.
        sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert sleep_s + server.drain_s < pod["spec"]["terminationGracePeriodSeconds"]


def test_pods_have_no_more_rights_than_they_need(case: str) -> None:
    for _, pod, container in pods(case):
        spec, rights = pod["spec"], container["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert rights["readOnlyRootFilesystem"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        for volume in spec["volumes"]:
            assert (volume["name"] in writable) is ("emptyDir" in volume)
            assert "hostPath" not in volume


def test_every_service_has_replicas_a_budget_and_a_policy() -> None:
    for case in ("keys", "everything"):
        budgets, policies = of_kind(case, "PodDisruptionBudget"), of_kind(case, "NetworkPolicy")
        for service, pod, container in pods(case):
            labels = pod["metadata"]["labels"]
            (budget,) = (each for each in budgets.values() if selects(each["spec"]["selector"]["matchLabels"], labels))
            assert budget["spec"]["maxUnavailable"] == 1
            (policy,) = (
                each for each in policies.values() if selects(each["spec"]["podSelector"]["matchLabels"], labels)
            )
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            ports = {each["containerPort"] for each in container["ports"]} - {50063}
            callers = policy["spec"]["ingress"]
            assert {port["port"] for port in callers[0]["ports"]} == ports
            if service != "gateway":
                first = callers[0]["from"][0]["podSelector"]["matchLabels"]
                assert first["app.kubernetes.io/component"] == "gateway"


@pytest.mark.parametrize(
    ("case", "endpoint", "rule"),
    [
        ("traces", "https://collector.observability:4317", {"ports": [{"port": 4317, "protocol": "TCP"}]}),
        ("everything", "http://collector:14317", {"to": [PEER], "ports": [{"port": 4317}]}),
    ],
)
def test_every_pod_can_send_traces_to_the_collector(case: str, endpoint: str, rule: dict[str, Any]) -> None:
    for _, _, container in pods(case):
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == endpoint
    policies = of_kind(case, "NetworkPolicy")
    assert len(policies) == 3
    for policy in policies.values():
        rules = policy["spec"]["egress"]
        assert rule in rules
        assert any(port["port"] == 53 for each in rules for port in each.get("ports", ()))


def test_without_a_hub_and_traces_drafts_reach_nothing() -> None:
    assert of_kind("keys", "NetworkPolicy")["tandem-draft"]["spec"]["egress"] == []


def test_a_model_over_several_pods_is_one_replica() -> None:
    sets = of_kind("everything", "StatefulSet")
    assert list(sets) == ["tandem-target-0", "tandem-target-1"]
    for name, each in sets.items():
        container = each["spec"]["template"]["spec"]["containers"][0]
        assert each["spec"]["replicas"] == 2
        assert {"--nnodes=2", "--nproc-per-node=4", f"--master-addr={name}-0.tandem-target-ranks"} <= set(
            container["command"]
        )
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    services = of_kind("everything", "Service")
    assert services["tandem-target"]["spec"]["selector"]["apps.kubernetes.io/pod-index"] == "0"
    assert services["tandem-target-ranks"]["spec"]["publishNotReadyAddresses"]


def test_scaled_workloads_leave_their_replicas_to_the_scaler() -> None:
    scalers = of_kind("everything", "HorizontalPodAutoscaler")
    assert set(scalers) == {"tandem-gateway", "tandem-draft"}
    for scaler in scalers.values():
        assert "replicas" not in workloads("everything")[scaler["spec"]["scaleTargetRef"]["name"]]["spec"]
    (metric,) = scalers["tandem-draft"]["spec"]["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "500m"}


def test_every_value_is_in_the_schema_and_wrong_ones_are_refused() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    for case in CASES.values():
        jsonschema.validate(case, schema)
    for wrong in (
        {"target": {"replica": 2}},
        {"model": {"numSpeculativeTokens": 65}},
        {"gateway": {"drainSeconds": 0}},
        {"tracing": {"endpoint": "http://collector"}},
        {"inferencePool": {"enabled": True, "endpointPicker": ""}},
        {"draft": {"autoscaling": {"busyShare": 1.5}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)

"""The recipes of deploy/engines: valid for Kubernetes, with options that vLLM's plug-in and the draft service take."""

from __future__ import annotations

import ast
import json
from typing import Any

import kubernetes_validate
import pytest

import draft_service.main
from tandem.checkpoints import DRAFT, find_checkpoint
from tandem_integrations.settings import PREFIX, RemoteDraftSettings
from tandem_integrations.vllm import RemoteProposer
from tests.deploy.engine_recipes import FOLDER, containers, engine_arguments, manifests, pods, services
from tests.deploy.test_chart import KUBERNETES

DRAFTER = {
    "method": "custom_class",
    "model": f"{RemoteProposer.__module__}.{RemoteProposer.__qualname__}",
    "num_speculative_tokens": 4,
}


#: In place of a folder that is not here.
MODEL = ("--model", find_checkpoint(DRAFT))


def speculative_config(arguments: list[str]) -> Any:
    text = "=".join(arguments).partition("--speculative-config=")[2]
    return json.loads(text.partition("}")[0] + "}")


@pytest.mark.parametrize("name", ["docker-compose.yml", "kubernetes.yaml", "llm-d.yaml", "dynamo.yaml"])
def test_vllm_is_given_the_plug_in(name: str) -> None:
    assert speculative_config(engine_arguments()[name]) == DRAFTER


def test_ray_gives_vllm_the_plug_in_with_its_options() -> None:
    tree = ast.parse((FOLDER / "ray_serve.py").read_text())
    (given,) = (
        ast.literal_eval(each.value)
        for each in ast.walk(tree)
        if isinstance(each, ast.keyword) and each.arg == "engine_kwargs"
    )
    assert given["speculative_config"] == DRAFTER
    assert RemoteDraftSettings.read(given["additional_config"]["tandem"]).draft == "127.0.0.1:50062"


def test_pods_are_valid() -> None:
    checked = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod} for name, pod in pods()]
    for each in checked:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert len(checked) == 5


@pytest.mark.parametrize(("name", "kinds"), [("kubernetes.yaml", 2), ("dynamo.yaml", 2)])
def test_objects_of_kubernetes_are_valid(name: str, kinds: int) -> None:
    objects = [each for each in manifests(name) if "nvidia.com" not in each["apiVersion"]]
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert len(objects) == kinds


def draft_commands() -> dict[str, list[str]]:
    found = {"docker-compose.yml": services()["draft"]["command"]}
    return found | {
        name: each["args"] for name, each in containers() if each["image"].startswith("registry.example/tandem:")
    }


@pytest.mark.parametrize("name", ["docker-compose.yml", "kubernetes.yaml", "llm-d.yaml", "dynamo.yaml"])
def test_the_engine_looks_for_the_draft_where_it_listens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *arguments = draft_commands()[name]
    assert command == "draft"
    _, draft = draft_service.main.settings_of(draft_service.main.build_parser().parse_args([*arguments, *MODEL]))
    variables = [services()["vllm"]["environment"]] if name == "docker-compose.yml" else []
    variables += [
        {each["name"]: each["value"] for each in container["env"]}
        for file, container in containers()
        if file == name and "env" in container
    ]
    for key, value in ((key, value) for each in variables for key, value in each.items() if key.startswith(PREFIX)):
        monkeypatch.setenv(key, value)
    wanted = RemoteDraftSettings.read({}).draft
    if wanted.startswith("unix:"):
        assert draft.socket == wanted
    else:
        host, _, port = wanted.partition(":")
        assert int(port) == draft.port
        assert (host == "127.0.0.1") == (draft.host == "127.0.0.1")


def test_both_containers_of_a_socket_mount_its_folder() -> None:
    mounts = [
        {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        for name, container in containers()
        if name == "kubernetes.yaml"
    ]
    assert [each["/run/tandem"] for each in mounts] == ["socket", "socket"]
    assert all("socket:/run/tandem" in services()[name]["volumes"] for name in ("draft", "vllm"))

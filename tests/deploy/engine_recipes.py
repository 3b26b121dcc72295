"""The recipes of deploy/engines, tried: with Docker, or by the parsers of what they are for.

``VLLM_IMAGE=… python -m tests.deploy.engine_recipes compose`` starts one draft and two replicas of vLLM as
docker-compose.yml says, and asks them while the draft is absent, there, killed and back; ``--no-build`` takes the
images that are there. ``… parse vllm|ray|dynamo PYTHON`` has the package in that environment read the options;
``… crd FILE`` compares manifests with a CustomResourceDefinition.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema
import yaml

from tandem.checkpoints import TARGET, find_checkpoint
from tests.e2e.compose import compose, say

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "deploy" / "engines"
PROMPTS: Final = ("def fibonacci(n):\n", "import os\n\n\ndef walk(path):\n", "class Stack:\n    def __init__(self):\n")
ACCEPTED: Final = re.compile(r"^vllm:spec_decode_num_accepted_tokens_total\S* ([0-9.e+]+)$", re.MULTILINE)
#: What a package makes of a recipe's options, by the name of the package. Prints JSON.
PARSERS: Final = {
    "vllm": """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
read = {"speculative_config": {name: getattr(config.speculative_config, name)
        for name in ("method", "model", "num_speculative_tokens")}, "additional_config": config.additional_config}
""",
    "dynamo": """
from dynamo.vllm.args import parse_args
read = vars(parse_args(sys.argv[1:]).engine_args)
""",
    "ray": """
import runpy
from ray.serve.llm import LLMConfig
found = runpy.run_path("deploy/engines/ray_serve.py")
read = found["config"].get_engine_config().engine_kwargs
""",
}


def manifests(name: str) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.load_all((FOLDER / name).read_text(), yaml.CSafeLoader))


def services() -> dict[str, dict[str, Any]]:
    """Those of docker-compose.yml, with variables at their defaults."""
    text = re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda found: found[1] or "", (FOLDER / "docker-compose.yml").read_text())
    found: dict[str, dict[str, Any]] = yaml.load(text, yaml.CSafeLoader)["services"]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """All specifications of pods, with the name of their file."""
    for name in ("kubernetes.yaml", "llm-d.yaml", "dynamo.yaml"):
        for each in manifests(name):
            match each["kind"]:
                case "Deployment":
                    yield name, each["spec"]["template"]["spec"]
                case "LLMInferenceService":
                    yield name, each["spec"]["template"]
                case "DynamoGraphDeployment":
                    yield from ((name, part["podTemplate"]["spec"]) for part in each["spec"]["components"])


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """All containers, with the name of their file."""
    for name, pod in pods():
        yield from ((name, each) for each in (*pod.get("initContainers", ()), *pod["containers"]))


def engine_arguments() -> dict[str, list[str]]:
    """The arguments that vLLM gets, by recipe."""
    found = {"docker-compose.yml": shlex.split(services()["vllm"]["command"])}
    for name, container in containers():
        variables = {each["name"]: each["value"] for each in container.get("env", ())}
        if (more := variables.get("VLLM_ADDITIONAL_ARGS")) is not None:  # KServe gives it to the shell's `eval`
            found[name] = ["--model=/mnt/models", *shlex.split(more)]
        elif "speculative-config" in str(container.get("args")):
            found[name] = container["args"]
    return found


def parse(package: str, python: str) -> None:
    """Have a package read the options of the recipes that are for it."""
    arguments = engine_arguments()
    files = {"dynamo": ["dynamo.yaml"], "ray": ["ray_serve.py"], "vllm": sorted(set(arguments) - {"dynamo.yaml"})}
    for name in files[package]:
        given = [re.sub(r"(/mnt)?/models(/\w\S*)?$", find_checkpoint(TARGET), each) for each in arguments.get(name, ())]
        program = f"import json, sys{PARSERS[package]}print(json.dumps([read['speculative_config'],"
        program += " read.get('additional_config')]))"
        printed = subprocess.run(
            [python, "-c", program, *given], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
        speculative, additional = json.loads(printed.stdout.splitlines()[-1])
        assert speculative["model"] == "tandem_integrations.vllm.RemoteProposer", speculative
        say(f"{name}: {package} reads {json.dumps(speculative)}, additional_config {json.dumps(additional)}")


def check_crd(path: str) -> None:
    """Compare the manifests of a kind with its definition; unknown fields are errors."""
    definition = yaml.load(Path(path).read_text(), yaml.CSafeLoader)
    for file in ("llm-d.yaml", "dynamo.yaml"):
        for each in manifests(file):
            if each["kind"] != definition["spec"]["names"]["kind"]:
                continue
            version = each["apiVersion"].partition("/")[2]
            (schema,) = (one["schema"] for one in definition["spec"]["versions"] if one["name"] == version)
            jsonschema.validate(each, _closed(schema["openAPIV3Schema"]) | {"additionalProperties": True})
            say(f"{file} is a valid {each['kind']} of {each['apiVersion']}")


def _closed(schema: Any) -> Any:
    """A schema in which objects have the properties that are named, and no others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(each) for name, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return found


def ask(url: str) -> tuple[list[str], float]:
    """The texts of a replica, and the drafted tokens that it has accepted so far."""
    body = {"model": "target", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    texts = []
    for prompt in PROMPTS:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=120).raise_for_status()
        texts.append(answer.json()["choices"][0]["text"])
    found = ACCEPTED.search(httpx.get(f"{url}/metrics", timeout=10).text)
    return texts, float(found[1]) if found else 0.0


def wait_for_engine(url: str, timeout_s: float = 400) -> None:
    """Until a replica answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, _compose("logs", "--tail", "50", "vllm", check=False).stdout
        time.sleep(1)


def check_compose(*, builds: bool) -> None:
    """One draft for two replicas."""
    urls = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    if builds:
        _compose("build")
    try:
        _compose("up", "-d", "--scale", "vllm=2", "--scale", "draft=0", VLLM_PORT="8000-8001")
        for url in urls:
            wait_for_engine(url)
        plain = [ask(url)[0] for url in urls]
        assert plain[0] == plain[1]
        say("two replicas answer before the draft is there")
        for deed in (("up", "-d", "--no-recreate", "--scale", "vllm=2"), ("kill", "draft"), ("start", "draft")):
            _compose(*deed, VLLM_PORT="8000-8001")
            is_there = deed[0] != "kill"
            if is_there:
                _compose("exec", "-T", "draft", "sh", "-c", HEALTHY)
            for url, texts in zip(urls, plain, strict=True):
                before = ask(url)[1]  # the first request finds the draft, or that it is lost
                again, accepted = ask(url)
                assert again == texts, (again, texts)
                assert (accepted > before) == is_there, (accepted, before)
            say(f"after `docker-compose {deed[0]}`: texts equal, drafts {'accepted' if is_there else 'absent'}")
    finally:
        _compose("down", "--volumes", "--timeout", "5", check=False)


#: Wait in the draft's container until the service is ready.
HEALTHY: Final = "until tandem health --grpc unix:/run/tandem/draft.sock; do sleep 0.2; done"


def _compose(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return compose("-f", str(FOLDER / "docker-compose.yml"), *arguments, **options)


def main(arguments: list[str]) -> int:
    """Run what is named."""
    match arguments:
        case ["compose", *options]:
            check_compose(builds="--no-build" not in options)
        case ["parse", package, python]:
            parse(package, python)
        case ["crd", path]:
            check_crd(path)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

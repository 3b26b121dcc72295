"""What is installed is all that is here: tests import from the checkout, which would hide what a wheel lacks.

`make dist` builds the wheel with its libraries, which takes minutes, and runs it without a compiler.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import yaml

import specdec

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
METADATA = PROJECT["project"]
PACKAGES = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
#: What a checkout may hold that is not part of the project.
NOT_OURS = shutil.ignore_patterns(
    *(
        ".git",
        ".venv",
        "*.egg-info",
        "build",
        "dist",
        "generated",
        "node_modules",
        "__pycache__",
        ".*_cache",
        ".hypothesis",
        "*.pyc",
    )
)
#: Files that a developer's npm leaves in the checkout.
LEFT_BY_NPM = (
    "clients/typescript/node_modules/left/index.js",
    "clients/typescript/build/left.js",
    "clients/typescript/dist/left.js",
    "clients/typescript/src/generated/left.ts",
    "tests/clients/node/ai/node_modules/@left/pad/index.js",
    "tests/page/node_modules/left.js",
)


def files_of(folder: Path, *below: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix() for name in below for path in (folder / name).rglob("*") if path.is_file()
    }


def test_sdist_and_wheel_are_complete(tmp_path: Path) -> None:
    """The wheel, made from the sdist, holds every file of every package; the sdist also what tests them."""
    checkout = tmp_path / "checkout"  # where no earlier build has left anything
    shutil.copytree(ROOT, checkout, ignore=NOT_OURS)
    parts = (*PACKAGES, "benchmarks", "clients", "deploy", "docs", "protos", "tests")
    ours = files_of(checkout, *parts)
    for name in LEFT_BY_NPM:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    shutil.unpack_archive(tmp_path / f"tandem_specdec-{specdec.__version__}.tar.gz", tmp_path)
    unpacked = tmp_path / f"tandem_specdec-{specdec.__version__}"
    assert files_of(unpacked, *parts) == ours

    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-C", "wheel.cmake=false", "--wheel-dir", str(tmp_path), str(unpacked)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == files_of(checkout, *PACKAGES)


def test_the_plugin_for_engines_needs_what_it_says_alone(tmp_path: Path) -> None:
    """Its wheel imports without Tandem's other packages, and without those that Tandem needs beside its own."""
    plugin = ROOT / "deploy/engine_plugin"
    needs = {
        name.split(">")[0] for name in tomllib.loads((plugin / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    assert needs == {"grpcio", "numpy", "protobuf"}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(plugin)], check=True)
    (wheel,) = tmp_path.glob("tandem_engine_plugin-*.whl")
    script = (
        "import sys\n"
        f"sys.path[:] = [{str(wheel)!r}, *(each for each in sys.path if each != {str(ROOT)!r})]\n"
        "import tandem_integrations.vllm, tandem_integrations.sglang\n"
        "assert tandem_integrations.__file__.startswith(sys.path[0])\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    command = [
        sys.executable,
        "-S",
        "-P",
        "-c",
        f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n{script}",
    ]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.split()
    # grpc imports its sisters where they are installed.
    named = {name for name in found if not name.startswith(("_", "cython", "grpc_"))}
    assert named == {"specdec", "tandem_integrations", "google", "grpc", "numpy", "typing_extensions"}


def test_every_top_level_package_is_installed() -> None:
    """A folder that the import contracts know is a package of the wheel, and so are those that they import."""
    assert set(PACKAGES) == set(PROJECT["tool"]["importlinter"]["root_packages"])


def test_an_editable_install_needs_no_cmake(tmp_path: Path) -> None:
    """It runs the checkout, new files and data included, and compiles at the first start."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_OURS)
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "/nonexistent", "CMAKE_EXECUTABLE": "/nonexistent"}
    environment["PYTHONPATH"] = sysconfig.get_path("purelib")  # the build backend of this environment
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--editable", str(checkout)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    (checkout / "specdec/added_later.py").touch()
    script = (
        "from importlib import resources, util\n"
        "print(util.find_spec('specdec.added_later').origin)\n"
        "print(util.find_spec('gateway.rest').origin)\n"
        "print(resources.files('tandem') / 'models/python-12m/config.json')\n"
    )
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    files = ("specdec/added_later.py", "gateway/rest/__init__.py", "tandem/models/python-12m/config.json")
    assert done.stdout.split() == [str(checkout / name) for name in files]


def test_the_image_holds_what_the_build_needs() -> None:
    """The Dockerfile copies every package and every file that pyproject.toml names; engines get the plug-in beside."""
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    installed = re.findall(r"/tmp/tandem/(\S+)", (ROOT / "deploy/engines/Dockerfile").read_text())
    assert {*PACKAGES, "pyproject.toml", METADATA["readme"], *METADATA["license-files"]} <= names
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {*names, *installed} == allowed
    assert all((ROOT / name).exists() for name in names)


def test_the_lock_has_a_hash_of_everything_and_fits_the_pins() -> None:
    """What `make lock` writes: each package one version per Python, the pinned ones as pinned, each with hashes."""
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().split("\n", 2)[2])
    versions: dict[str, set[str]] = {}
    for entry in entries:
        name, version = re.match(r"([a-z0-9-]+)==([^ ;]+)", entry).groups()
        versions.setdefault(name, set()).add(version)
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    needed = {re.match(r"[a-z0-9-]+", line)[0] for line in METADATA["dependencies"]}
    assert needed <= versions.keys()
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in pins.keys() & versions.keys():
        assert versions[name] == {pins[name]}, f"{name}: run `make lock`"


def test_compose_gives_no_service_more_than_it_needs() -> None:
    """Each container is locked down, its certificates and its cache are its own, and only the gateway is published."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    writable: list[str] = []
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert ("ports" in service) is (name == "gateway")
        writable += [volume for volume in service["volumes"] if not volume.endswith(":ro")]
        assert "--insecure" not in service["command"]
        if name in ("target", "draft"):
            assert {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"} <= set(service["command"])
    assert len(writable) == len(set(writable))
    assert all(port.startswith("${TANDEM_PUBLISH:-127.0.0.1}:") for port in services["gateway"]["ports"])
    assert "--backend-ssl-ca-certs" in services["gateway"]["command"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "--require-hashes" in dockerfile
    assert re.search(r"^USER [1-9]\d*$", dockerfile, re.MULTILINE)


def test_ci_runs_the_targets_of_make_on_every_supported_python() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    supported = [line.rpartition(" ")[2] for line in METADATA["classifiers"] if ":: 3." in line]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported
    assert METADATA["requires-python"] == f">={supported[0]}"
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {command.split()[1] for command in commands} == {
        *("lint", "demo", "test", "test-typescript", "dist", "compose")
    }
    for fallback in jobs["fallbacks"]["strategy"]["matrix"]["include"]:
        assert all((ROOT / path).exists() for path in fallback["tests"].split())

"""Run the clients that users have against ``tandem serve``, each in an environment of its own.

``python -m tests.clients.run`` runs all, ``python -m tests.clients.run openai ai`` some. Python clients have their pins
in ``requirements/NAME.txt`` and their checks in ``python/check_NAME.py``, npm clients both in ``node/NAME``;
``cpp`` and ``go`` are programs in ``clients/``. The environments are kept in ``.venv/clients``. With ``--write`` the
table in ``docs/clients.md`` says what passed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.clients.programs import PROGRAMS, missing, run_program
from tests.clients.serve import ROOT, serve, served

HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".venv" / "clients"
RESULTS = ENVIRONMENTS / "results.json"
PAGE = ROOT / "docs" / "clients.md"
TABLE = re.compile(r"(?<=\| --- \| --- \| --- \|\n)(\|.*\n)*")
CHECK_TIMEOUT_S = 900
#: Flags of a server that only this client asks: invented requests without a limit generate until the context is full.
OWN_SERVERS = {"schemathesis": ("--max-model-len", "128")}


@dataclass(frozen=True)
class Result:
    """What became of one client."""

    packages: str
    checks: str
    passed: int
    failed: int
    #: Why it did not run, or not to its end.
    reason: str = ""

    @property
    def row(self) -> str:
        """Its line of the table."""
        outcome = self.reason or f"{self.passed}" + (f", {self.failed} failed" if self.failed else "")
        return f"{self.packages} | {self.checks} | {outcome} |"


def run_checks(command: list[str], environment: dict[str, str], folder: Path = ROOT) -> tuple[str, int, str]:
    """Run a command in ``folder``: what it printed, its exit status, and why it did not end, if so.

    One that takes longer than :data:`CHECK_TIMEOUT_S` is killed with all that it started.
    """
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        reason = ""
        try:
            printed, _ = process.communicate(timeout=CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            printed, reason = (error.stdout or b"").decode(errors="replace"), f"did not end within {CHECK_TIMEOUT_S} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    print(printed, file=sys.stderr)
    return printed, process.returncode, reason


class PythonClient:
    """A package of PyPI, with its checks under pytest."""

    def __init__(self, name: str) -> None:
        self._requirements = HERE / "requirements" / f"{name}.txt"
        self._file = HERE / "python" / f"check_{name}.py"
        self._folder = ENVIRONMENTS / name
        self._python = self._folder / "bin" / "python"

    def install(self) -> None:
        """Install what is pinned, unless it is there."""
        stamp, wanted = self._folder / "requirements.txt", self._requirements.read_text()
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        venv.create(self._folder, with_pip=True)
        pip = [str(self._python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = self._folder / "constraints.txt"
        # Some clients need torch; the build that is here, and not one of gigabytes.
        constraints.write_text("".join(re.findall(r"^torch==.*\n", (ROOT / "constraints.txt").read_text(), re.M)))
        subprocess.run([*pip, "--constraint", str(constraints), "--requirement", str(self._requirements)], check=True)
        stamp.write_text(wanted)

    def run(self, environment: dict[str, str]) -> Result:
        """The result of its checks."""
        path = f"{self._folder / 'bin'}{os.pathsep}{environment['PATH']}"
        command = [str(self._python), "-m", "pytest", "-c", str(HERE / "python" / "pytest.ini"), "-rA", str(self._file)]
        printed, status, reason = run_checks(command, environment | {"PATH": path, "PYTHONPATH": ""})
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|errors?)", printed[-500:])}
        pins = [line.split("==") for line in self._requirements.read_text().splitlines() if "==" in line]
        packages = ", ".join(f"`{name}` {version}" for name, version in pins if name != "pytest")
        passed = counts.pop("passed", 0)
        checks = ast.get_docstring(ast.parse(self._file.read_text())) or ""
        failed = sum(counts.values()) or int(status != 0)
        return Result(packages, checks, passed, failed, reason)


class NodeClient:
    """Packages of npm, with their checks under Node's test runner."""

    def __init__(self, name: str) -> None:
        self._folder = HERE / "node" / name
        self._package = json.loads((self._folder / "package.json").read_text())

    def install(self) -> None:
        """Install what is locked, unless it is there."""
        done, lock = self._folder / "node_modules" / ".package-lock.json", self._folder / "package-lock.json"
        if done.exists() and done.stat().st_mtime >= lock.stat().st_mtime:
            return
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True)

    def run(self, environment: dict[str, str]) -> Result:
        """The result of its checks."""
        command = ["node", "--test", "--test-reporter=tap", "check.mjs"]
        printed, status, reason = run_checks(command, environment, self._folder)
        counts = {kind: int(count) for kind, count in re.findall(r"^# (pass|fail|cancelled) (\d+)$", printed, re.M)}
        packages = ", ".join(f"`{name}` {version}" for name, version in self._package["dependencies"].items())
        failed = counts.get("fail", 0) + counts.get("cancelled", 0)
        failed = failed or int(status != 0)
        return Result(f"{packages} (Node.js)", self._package["description"], counts.get("pass", 0), failed, reason)


class Program:
    """A program in ``clients/``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def install(self) -> None:
        """Nothing: its tools are packages of the system."""

    def run(self, environment: dict[str, str]) -> Result:
        """The result of compiling and running it."""
        client = f"[`clients/{self._name}`](../clients/{self._name}) ({PROGRAMS[self._name][0]})"
        checks = "compiles; prints the text"
        if tools := missing(self._name):
            absent = ", ".join(f"`{tool}`" for tool in tools)
            return Result(client, checks, 0, 0, f"not compiled: {absent} missing")
        try:
            printed = run_program(self._name, environment["TANDEM_GRPC"])
        except subprocess.CalledProcessError as error:
            print(error.stdout, error.stderr, sep="\n", file=sys.stderr)
            printed = ""
        return Result(client, checks, int(bool(printed)), int(not printed))


def clients() -> dict[str, PythonClient | NodeClient | Program]:
    """The clients by name."""
    python = {path.stem: PythonClient(path.stem) for path in sorted((HERE / "requirements").glob("*.txt"))}
    npm = [path.parent.name for path in sorted((HERE / "node").glob("*/package.json"))]
    return python | {name: NodeClient(name) for name in npm} | {name: Program(name) for name in PROGRAMS}


def main() -> int:
    """Run the clients; 1 where a check failed."""
    known = clients()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all by default")
    parser.add_argument("--write", action="store_true", help="write the table in docs/clients.md")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(known)}")
    names = args.names or list(known)
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    has_failed = False
    with served() as where:
        for name in names:
            begun = time.monotonic()
            client = known[name]
            client.install()
            if name in OWN_SERVERS:
                with serve(*OWN_SERVERS[name]) as own:
                    result = client.run(os.environ | where | {"TANDEM_URL": own["url"]})
            else:
                result = client.run(os.environ | where)
            has_failed |= bool(result.failed)
            results[name] = asdict(result)
            RESULTS.write_text(json.dumps(results, indent=1))
            print(f"{name}: {result.row} {time.monotonic() - begun:.0f} s", flush=True)
    if args.write:
        rows = "".join(f"| {Result(**results[name]).row}\n" for name in known if name in results)
        PAGE.write_text(TABLE.sub(lambda _: rows, PAGE.read_text(), count=1))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

"""Prometheus over a real `tandem serve`: ``make test-observability``. Needs prometheus and promtool.

Checks the files of deploy/observability with promtool, lets Prometheus read a gateway with API keys under load, and
runs every query of the dashboard and of the alerts: each must have data.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from tandem.launcher.deployment import free_port
from tests.deploy.queries import ALERTS, FOLDER, alert_queries, panel_queries
from tests.e2e.conftest import PROMPTS

ROOT: Final = Path(__file__).parents[2]
#: Seconds until every query must have data.
TIMEOUT_S: Final = 240
#: Seconds between two reads of the gateway.
INTERVAL: Final = "1s"


def say(text: str) -> None:
    print(text, flush=True)


def check_files(config: Path) -> None:
    """What promtool and docker-compose say of the files."""
    commands = [
        ["promtool", "check", "rules", str(ALERTS)],
        ["promtool", "check", "config", str(config)],
        ["promtool", "test", "rules", "tests/deploy/alerts_test.yml"],
    ]
    if shutil.which("docker-compose"):
        commands.append(
            ["docker-compose", "-f", "docker-compose.yml", "-f", "deploy/observability.yml", "config", "--quiet"]
        )
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        say(f"ok: {' '.join(command[:3])}")


def make_key(name: str, *options: str) -> tuple[str, str]:
    """An API key and its line of the key file."""
    command = [sys.executable, "-m", "tandem", "key", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr.rpartition(": ")[2].strip(), done.stdout


def prometheus_config(folder: Path, gateway: str, key: str) -> Path:
    """The shipped configuration, but with a known address in place of Compose's DNS, and shorter intervals."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(ALERTS)]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [gateway]}]
    (folder / "key").write_text(key)
    job["authorization"]["credentials_file"] = str(folder / "key")
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running(*command: str, log: Path) -> Iterator[None]:
    """A process that ends with the block; ``log`` gets what it prints."""
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
            assert process.poll() is None, f"{command[0]} ended:\n{tail_of(log)}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def tail_of(log: Path) -> str:
    return log.read_text()[-4000:]


async def wait_for(client: httpx.AsyncClient, url: str, log: Path, what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if (await client.get(url)).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        assert time.monotonic() < deadline_s, f"{what} is not ready:\n{tail_of(log)}"
        await asyncio.sleep(0.2)


async def load(client: httpx.AsyncClient, gateway: str, key: str, small_key: str) -> None:
    """Requests of all kinds, over and over: with and without speculation, wrong ones, too many of one client."""
    url, number = f"{gateway}/v1/completions", 0
    while True:
        prompt = PROMPTS[number % len(PROMPTS)]
        bodies = [
            (key, {"prompt": prompt, "max_tokens": 64, "temperature": 0}),
            (key, {"prompt": prompt, "max_tokens": 8, "speculation": {"num_speculative_tokens": 0}}),
            (key, {"prompt": prompt, "temperature": -1}),
            (small_key, {"prompt": prompt, "max_tokens": 4}),
        ]
        answers = await asyncio.gather(
            *(client.post(url, json=body, headers={"Authorization": f"Bearer {each}"}) for each, body in bodies)
        )
        statuses = [answer.status_code for answer in answers]
        # After a minute the small key may ask once more.
        assert statuses in ([200, 200, 400, 200], [200, 200, 400, 429]), [answer.text for answer in answers]
        number += 1


async def has_data(client: httpx.AsyncClient, prometheus: str, query: str) -> bool:
    """Whether a query has a number now."""
    answer: Any = (await client.get(f"{prometheus}/api/v1/query", params={"query": query})).json()
    assert answer["status"] == "success", f"{query}\n{answer}"
    return any(math.isfinite(float(result["value"][1])) for result in answer["data"]["result"])


async def check(folder: Path) -> None:
    """Serve, load, scrape, ask."""
    key, line = make_key("prometheus")
    small_key, small_line = make_key("small", "--client-requests-per-minute", "1")
    (folder / "keys").write_text(line + small_line)
    ports = [free_port() for _ in range(3)]
    gateway, prometheus = (f"http://127.0.0.1:{port}" for port in ports[:2])
    config = prometheus_config(folder, f"127.0.0.1:{ports[0]}", key)
    check_files(config)
    serve = [sys.executable, "-m", "tandem", "serve", "--api-key-file", str(folder / "keys")]
    serve += ["--port", str(ports[0]), "--grpc-port", str(ports[2])]
    scrape = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    scrape += [f"--web.listen-address=127.0.0.1:{ports[1]}"]
    serve_log, scrape_log = folder / "serve.log", folder / "prometheus.log"
    async with httpx.AsyncClient(timeout=60) as client:
        with running(*serve, log=serve_log):
            await wait_for(client, f"{gateway}/health", serve_log, "tandem serve")
            assert (await client.get(f"{gateway}/metrics")).status_code == 401
            say("ok: /metrics asks for a key")
            with running(*scrape, log=scrape_log):
                await wait_for(client, f"{prometheus}/-/ready", scrape_log, "Prometheus")
                loading = asyncio.create_task(load(client, gateway, key, small_key))
                deadline_s = time.monotonic() + TIMEOUT_S
                queries = [query for _, query in (*panel_queries(), *alert_queries())]
                missing = queries
                while missing:
                    assert not loading.done(), loading.exception()
                    assert time.monotonic() < deadline_s, "no data for\n" + "\n".join(missing)
                    await asyncio.sleep(1)
                    missing = [query for query in missing if not await has_data(client, prometheus, query)]
                loading.cancel()
                say(f"ok: {len(queries)} queries have data")
                rules = (await client.get(f"{prometheus}/api/v1/rules")).json()["data"]["groups"]
                states = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
                assert set(states.values()) == {"ok"}, json.dumps(states)
                say(f"ok: {len(states)} alerts are evaluated")


def main() -> int:
    for tool in ("prometheus", "promtool"):
        if shutil.which(tool) is None:
            say(f"{tool} is missing; install Prometheus (Debian: apt-get install prometheus)")
            return 1
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

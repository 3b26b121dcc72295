"""The first hour on a GPU: steps of at most nine minutes, each with a JSON file and a verdict, and a report of them.

``python -m benchmarks.first_gpu_hour FOLDER`` runs the steps that have no result or failed, each in a process of its
own, and writes ``FOLDER/report.md``. It may be stopped and started again at any time, and stops after ``--seconds``.
``--device cpu --sizes tiny`` tries every step without a GPU; the numbers mean nothing then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks import command, passes, random_pairs
from benchmarks.random_pairs import SHAPES
from specdec.errors import InvalidRequest, Unavailable
from specdec.flags import Parser

SIZES: Final = ("1B", "7B", "tiny")
#: Seconds of a step; then it is killed, and counts as failed.
STEP_S: Final = 540
#: A step that has less is left to the next call.
LEAST_S: Final = 60
K: Final = 4
_MAX_MODEL_LEN: Final = 8192
#: Layers of the random model whose logits are compared with the CPU's.
_CHECKED_LAYERS: Final = 2
#: Share of the GPU's memory for the services; Hugging Face has its copies of the models in the rest.
_SERVICES_SHARE: Final = "0.6"
_KERNEL_TESTS: Final = ("tests/engine/cuda/test_compilation.py",)
_ROOMS: Final = ("engine/cuda", "engine/quantised", "engine/sampling", "target_service/verification")
#: How texts are drafted that must equal plain decoding.
_DRAFTERS: Final[Mapping[str, Any]] = {
    "chains": {"method": "draft_model"},
    "trees": {"method": "draft_model", "tree_top_k": 3},
    "head": {"method": "eagle3"},
    "head's trees": {"method": "eagle3", "tree_top_k": 3},
}
_PROMPTS: Final = ("def main():\n", "class Reader:\n    ", "import os\n\n", "for line in lines:\n    ")

PASSED, BELOW, FAILED = "passed", "below its bar", "FAILED"
#: What a step found: its verdict, one of these, and its numbers.
Found = tuple[str, str, dict[str, Any]]


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m benchmarks.first_gpu_hour", description=__doc__)
    flags.add_argument("folder", type=Path, help="for models, JSON files, logs and the report")
    flags.add_argument("--sizes", type=command.names(SIZES), default=("1B", "7B"), help="1B, 7B, tiny")
    flags.add_argument("--device", default="cuda:0", help="default: cuda:0")
    flags.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the timings")
    flags.add_argument("--sessions", type=command.numbers, default=(1, 8, 32, 128), help="at once")
    flags.add_argument("--contexts", type=command.numbers, default=(512, 4096), help="entries each")
    flags.add_argument("--repeats", type=int, default=30, help="of every timing; medians count")
    flags.add_argument("--max-tokens", type=int, default=128, help="generated after each prompt")
    flags.add_argument("--chaos-seconds", type=int, default=90, help="of each of the two kinds of services")
    flags.add_argument("--tests", nargs="+", default=[f"tests/{room}" for room in _ROOMS], help="files or folders")
    flags.add_argument("--seconds", type=float, default=float("inf"), help="for this call; default: no limit")
    flags.add_argument("--only", metavar="STEP", help="run this step here, in this process")
    return flags


def steps(args: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace], Found]]:
    """All steps by name, in order."""
    found: dict[str, Callable[[argparse.Namespace], Found]] = {"environment": describe}
    for path in args.tests:
        found[path.removesuffix(".py").replace("/", "-")] = partial(run_tests, files=(path,))
    found["identity"] = compare
    for size in args.sizes:
        found[f"passes-{size}"] = partial(time_passes, size)
        for count in args.sessions:
            found[f"serve-{size}-{count}"] = partial(time_services, size, count)
        found[f"vllm-{size}"] = partial(time_vllm, size)
    return found | {"chaos": cause_chaos}


def describe(args: argparse.Namespace) -> Found:
    """The device and its bandwidth; the kernels compile on it and are right."""
    device = torch.device(args.device)
    is_gpu = device.type == "cuda"
    if is_gpu and not torch.cuda.is_available():
        raise Unavailable(
            "there is no CUDA device here; --device cpu --sizes tiny tries the steps without their meaning"
        )
    data: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "CPU"}
    if is_gpu:
        about = torch.cuda.get_device_properties(device)
        data |= {"device": about.name, "bytes": about.total_memory, "multiprocessors": about.multi_processor_count}
    data["bandwidth"] = passes.measure_bandwidth(device, 2**31 if is_gpu else 2**25, args.repeats)
    tests, state, _ = run_tests(args, files=_KERNEL_TESTS)
    return f"{data['device']}: {data['bandwidth'] / 1e9:.0f} GB/s; kernels: {tests}", state, data


def run_tests(_: argparse.Namespace, *, files: Sequence[str]) -> Found:
    """Tests that use the device where there is one."""
    done = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    state = FAILED if done.returncode else PASSED
    return lines[-1] if lines else "no tests ran", state, {"failed": failed}


def compare(args: argparse.Namespace) -> Found:
    """Logits and decisions beside the CPU's; texts of every drafter beside plain ones."""
    from tandem import LLM, SamplingParams  # noqa: PLC0415
    from tandem.checkpoints import TARGET, find_checkpoint  # noqa: PLC0415
    from tests.engine.cuda.agreement import check_device  # noqa: PLC0415 (torch)

    shape = replace(SHAPES[args.sizes[0]], num_layers=_CHECKED_LAYERS, num_draft_layers=_CHECKED_LAYERS)
    device = torch.device(args.device)
    options: Any = {"dtype": torch.float32, "device": device, "max_model_len": _MAX_MODEL_LEN}
    target, _ = random_pairs.write_pair(shape, args.folder / "checked", **options)
    bundled = find_checkpoint(TARGET)
    checks = [check for folder in (bundled, target) for check in check_device(folder, args.device)]

    def texts(device: str, config: Mapping[str, Any] | None) -> tuple[list[Any], int]:
        """And how many drafted tokens were accepted."""
        sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        with LLM(bundled, speculative_config=config, device=device, dtype="float32", fixed_draft_length=True) as llm:
            outputs = llm.generate(list(_PROMPTS), sampling)
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs if output.metrics is not None)
        return [list(output.outputs[0].token_ids) for output in outputs], accepted

    plain, _ = texts(args.device, None)
    data: dict[str, Any] = {}
    for name, config in _DRAFTERS.items():
        drafted, accepted = texts(args.device, config)
        data[name], data[f"tokens accepted of {name}"] = drafted == plain, accepted
    data["as on the CPU"] = texts("cpu", None)[0] == plain
    wrong = [check.name for check in checks if not check.passed] + [name for name, found in data.items() if not found]
    data["checks"] = [asdict(check) | {"passed": check.passed} for check in checks]
    if wrong:
        return f"differs: {', '.join(wrong)}", FAILED, data
    return f"{len(checks)} checks and all texts agree", PASSED, data


def time_passes(size: str, args: argparse.Namespace) -> Found:
    """Passes of the target against the bandwidth, with graphs and without, verdicts, and passes of the draft."""
    from engine.cuda.graphs import largest_rows  # noqa: PLC0415 (torch)
    from engine.loading.load import load_engine  # noqa: PLC0415 (torch)
    from engine.loading.memory import LargestStep  # noqa: PLC0415 (torch)
    from specdec.rules import Rule  # noqa: PLC0415 (torch)
    from specdec.settings import ModelSettings  # noqa: PLC0415 (torch)

    shape, (target, draft) = SHAPES[size], _pair(size, args)
    device = torch.device(args.device)
    num_bytes = 2**31 if device.type == "cuda" else 2**25
    data: dict[str, Any] = {"bandwidth": passes.measure_bandwidth(device, num_bytes, args.repeats)}
    loads = [(count, min(args.contexts)) for count in args.sessions] + [(1, max(args.contexts))]
    modes = {"greedy": (Rule.BLOCK, 0.0), **{str(rule): (rule, 1.0) for rule in Rule}}
    for is_eager in (False, True):
        settings = ModelSettings(model=target, device=args.device, enforce_eager=is_eager)
        engine = load_engine(settings, largest=LargestStep(largest_rows(max(args.sessions) * (K + 1))))
        engine.warm_up()
        timed = [
            asdict(step) | {"k": k, "share": step.bandwidth / data["bandwidth"], "verify_ratio": step.verify_ratio}
            for k in (K, 31)
            for step in passes.time_steps(
                engine, shape, k=k, loads=loads[: 1 if is_eager else None], repeats=args.repeats
            )
        ]
        data["eager" if is_eager else "steps"] = timed
        verifier = passes.warm_verifier(engine, captures=not is_eager)
        data[f"calls{'_eager' * is_eager}"] = passes.count_calls(engine, verifier, K)
        if not is_eager:
            data["path"], data["prefill_s"] = engine.runner.description, passes.time_prefill(engine, args.repeats)
            data["verdicts"] = str(verifier.on_gpu or "tensors")
            rows = min(passes.PREFILL_ROWS, engine.info.max_model_len)
            data["prefill_flops_per_s"] = passes.prefill_flops(shape, rows) / data["prefill_s"]
            timing = partial(passes.time_verdict, engine, verifier, k=K, repeats=args.repeats)
            data["verdict_s"] = {name: timing(rule, temperature=t) for name, (rule, t) in modes.items()}
        engine.close()
    engine = load_engine(ModelSettings(model=draft, device=args.device))
    engine.warm_up()
    timing = partial(passes.time_drafting, engine, k=K, repeats=args.repeats)
    data["draft_s"] = {name: timing(rule, temperature=t) for name, (rule, t) in modes.items()}
    engine.close()
    first = data["steps"][0]
    verdict = (
        f"{data['path']}, verdicts by {data['verdicts']}: decode {1e3 * first['decode_s']:.2f} ms, {first['share']:.2f}"
        f" of the bandwidth (bar 0.8); verify({K + 1}) / decode {first['verify_ratio']:.2f} (bar 1.1)"
    )
    return verdict, PASSED if first["share"] >= 0.8 and first["verify_ratio"] <= 1.1 else BELOW, data


def time_services(size: str, count: int, args: argparse.Namespace) -> Found:
    """``tandem bench``: services over gRPC, Hugging Face at one session; the pair commits some 3.4 tokens a round."""
    target, draft = _pair(size, args)
    file = args.folder / "bench.json"
    _run(
        *("-m", "tandem", "bench", "--model", target, "--speculative-config", json.dumps({"model": draft})),
        *("--device", args.device, "--dtype", args.dtype, "--k", str(K), "--json", str(file)),
        *("--batch-size", str(count), "--max-tokens", str(args.max_tokens), "--num-prompts", "2"),
        *("--max-num-batched-tokens", str(max(512, count * (K + 1)))),  # a round of all in one step
        *("--gpu-memory-utilization", _SERVICES_SHARE, *(["--compare", "hf"] if count == 1 else [])),
        check=True,
    )
    sections = json.loads(file.read_text())["sections"]
    rates = {mode: median(found["tokens_per_s"]) for mode, found in sections[0]["modes"].items()}
    gain = rates["draft_model"] / rates["plain"]
    verdict = f"{rates['draft_model']:.0f} tokens/s, {gain:.2f} x plain"
    if count > 1:
        return verdict, PASSED, {"sections": sections}
    over_hf = rates["draft_model"] / rates["HF assistant_model"]
    state = PASSED if gain >= 2 and over_hf >= 5 else BELOW
    return f"{verdict} (bar 2), {over_hf:.1f} x HF (bar 5)", state, {"sections": sections}


def time_vllm(size: str, args: argparse.Namespace) -> Found:
    """Plain vLLM on the same target, where it is installed."""
    if find_spec("vllm") is None:
        return "vLLM is not installed here", PASSED, {}
    engine = {"model": _pair(size, args)[0], "dtype": args.dtype, "max_model_len": 2048}
    batches = [[i % len(_PROMPTS) for i in range(count)] for count in args.sessions]
    job = {"engine": engine, "prompts": _PROMPTS, "num_tokens": args.max_tokens, "batches": batches}
    lines = _run("-m", "benchmarks.vllm_engine", json.dumps(job), check=True).stdout.splitlines()
    rates = [len(found["batch"]) * args.max_tokens / found["seconds"] for found in map(json.loads, lines)]
    data = dict(zip(map(str, args.sessions), rates, strict=True))
    return f"plain vLLM, one session: {rates[0]:.0f} tokens/s", PASSED, {"tokens_per_s": data}


def cause_chaos(args: argparse.Namespace) -> Found:
    """Services on the device are hurt at random, and nothing is lost."""
    done = _run("-m", "tests.reliability.chaos", "--seconds", str(args.chaos_seconds))
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else "it said nothing", FAILED if done.returncode else PASSED, {"lines": lines}


def _pair(size: str, args: argparse.Namespace) -> tuple[str, str]:
    """The random pair of a size, written once."""
    folder, device = args.folder / f"{size}-{args.dtype}", torch.device(args.device)
    if not (folder / "written").exists():
        dtype = getattr(torch, args.dtype)
        random_pairs.write_pair(SHAPES[size], folder, dtype=dtype, device=device, max_model_len=_MAX_MODEL_LEN)
        (folder / "written").touch()
    return str(folder / "target"), str(folder / "draft")


def _run(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise Unavailable(f"{' '.join(arguments[:3])} failed: {done.stderr.strip()[-2000:]}")
    return done


def run_step(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a step here and write its file."""
    started = time.monotonic()
    try:
        verdict, state, data = steps(args)[name](args)
    except Exception as error:  # whatever it is, the next steps are worth their time
        verdict, state, data = f"{type(error).__name__}: {error}", FAILED, {}
    return write_result(args.folder, name, verdict, state=state, seconds=time.monotonic() - started, data=data)


def write_result(folder: Path, name: str, verdict: str, **more: Any) -> dict[str, Any]:
    """Write a step's file at once, and return what it holds."""
    found = {"step": name, "verdict": verdict, **more}
    file = folder / f"{name}.json"
    file.with_suffix(".part").write_text(json.dumps(found, indent=1, default=str) + "\n")
    os.replace(file.with_suffix(".part"), file)
    return found


def report(folder: Path, names: Sequence[str]) -> str:
    """A page of what the files hold."""
    found = [each for name in names if (each := _result(folder, name)) is not None]
    lines = ["# The first hour on a GPU", "", "| step | | s | |", "| --- | --- | --- | --- |"]
    for each in found:
        verdict = each["verdict"].replace("\n", " ").replace("|", "/")
        lines.append(f"| {each['step']} | {each['state']} | {each['seconds']:.0f} | {verdict} |")
    for each in found:
        if rows := [row for key in ("steps", "eager") for row in each["data"].get(key, [])]:
            title = "| sessions | context | rows | decode, ms | share of the bandwidth | verify, ms | over decode |"
            lines += ["", f"## {each['step']}", "", title, "| --- " * 7 + "|"]
            for row in rows:
                ms, verify_ms = 1e3 * row["decode_s"], 1e3 * row["verify_s"]
                lines.append(
                    f"| {row['sessions']} | {row['context']} | {row['k'] + 1} | {ms:.3f} | {row['share']:.2f}"
                    f" | {verify_ms:.3f} | {row['verify_ratio']:.2f} |"
                )
            calls = f"{each['data']['calls']}, {each['data']['calls_eager']}"
            lines += ["", f"Passes without graphs come last. Calls: {calls}."]
        for section in each["data"].get("sections", []):
            rates = (f"{mode} {median(of['tokens_per_s']):.0f}" for mode, of in section["modes"].items())
            lines += ["", f"{each['step']}, {section['num_sessions']} sessions, tokens/s: {', '.join(rates)}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what has not passed, write the report; 1 where a step failed."""
    argv = sys.argv[1:]
    args = parser().parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only:
        if args.only not in steps(args):
            raise InvalidRequest(f"{args.only} is no step; the steps are {', '.join(steps(args))}", param="only")
        return int(run_step(args.only, args)["state"] == FAILED)
    states, ends = [], time.monotonic() + args.seconds
    for name in steps(args):
        found = _result(args.folder, name)
        if found is None or found["state"] == FAILED:
            if (left := ends - time.monotonic()) < LEAST_S:
                print(f"{name} and what follows it are left to the next call", flush=True)
                return 1
            found = run_apart(name, args.folder, argv, min(STEP_S, left))
        states.append(found["state"])
        print(f"{found['state']}  {name}: {found['verdict']}", flush=True)
        (args.folder / "report.md").write_text(report(args.folder, list(steps(args))))
    return int(FAILED in states)


def _result(folder: Path, name: str) -> Any:
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def run_apart(name: str, folder: Path, argv: Sequence[str], limit_s: float) -> Any:
    """Run a step in a process of its own, for so long as it may take."""
    (folder / f"{name}.json").unlink(missing_ok=True)
    command_line = [sys.executable, "-m", "benchmarks.first_gpu_hour", *argv, "--only", name]
    with (
        (folder / f"{name}.log").open("w") as log,
        subprocess.Popen(command_line, stdout=log, stderr=log, start_new_session=True) as child,
    ):
        try:
            why = f"it ended with status {child.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # what it started, too: it holds the device
            why = f"it took more than {limit_s:.1f} s"
    if (found := _result(folder, name)) is not None:
        return found
    return write_result(folder, name, f"{why}; see {name}.log", state=FAILED, seconds=limit_s, data={})


if __name__ == "__main__":
    command.run("benchmarks.first_gpu_hour", main)

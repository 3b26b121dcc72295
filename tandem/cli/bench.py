"""``tandem bench``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequest
from specdec.flags import Parser, whole_numbers
from specdec.params import SamplingParams
from tandem.bench.lengths import COUNTS, length_modes, yaml_of
from tandem.bench.modes import PLAIN, deployments_of, plain_mode, rules_of, speculative_modes
from tandem.bench.plot import load_pyplot
from tandem.bench.tasks import ALL_TASKS, TASKS
from tandem.cli.flags import add_deployment_flags, add_key_flag, client_key
from tandem.launcher.deployment import Deployment
from tandem.launcher.environment import tune_environment

if TYPE_CHECKING:
    from tandem.bench.measure import Bench
    from tandem.bench.plans import Plan
    from tandem.bench.results import Section


def add_arguments(parser: Parser) -> None:
    """The flags of ``tandem bench``."""
    parser.add_argument("--model", help="folder or hub name of the target; without it the bundled pair is measured")
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--drafter",
        metavar="A,B",
        help="methods such as draft_model, ngram, suffix, eagle3, eagle3-tree, suffix+draft_model, or dflash=FOLDER; or"
        " all (default: the configured one)",
    )
    group.add_argument(
        "--text",
        metavar="A,B",
        help="held-out prompts: prose, new code; tasks, the suite of eleven tasks, or some of them by name (default:"
        " prose, or tasks with --drafter all)",
    )
    group.add_argument("--rules", metavar="A,B", help="token, block, coupled, or all; differ at a temperature above 0")
    group.add_argument("--batch-size", type=whole_numbers, default=(1,), metavar="N,M", help="sessions at once")
    group.add_argument("--k", type=int, metavar="N", help="the same as --num-speculative-tokens")
    group.add_argument(
        "--structured", metavar="FILE", help="measure answers of this JSON schema, too: speed, cost of masks, validity"
    )
    group.add_argument(
        "--acceptance-lengths",
        nargs="?",
        type=whole_numbers,
        const=COUNTS,
        metavar="K,K",
        help="print the acceptance lengths of every task with 1 to 8 drafted tokens, or K, as YAML, and nothing else",
    )
    group.add_argument(
        "--synthetic-acceptance-length",
        type=float,
        metavar="X",
        help="the target accepts any drafted tokens, X - 1 a round on average: what serving costs with a draft that is"
        " not trained yet",
    )
    group.add_argument("--compare", choices=("hf",), help="hf: Hugging Face generate in the same run")
    group.add_argument("--pad-target", metavar="SIZE", help="measure the target padded to this size, such as 200M")
    group.add_argument(
        "--url", metavar="URL", help="a running server instead: http://host:port, or grpc://host:port of Tandem"
    )
    group.add_argument(
        "--plain-url", metavar="URL", help="with --url: a server of the same model that never speculates"
    )
    add_key_flag(group)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--extra-body", metavar="JSON", type=json_object, help="with --url: fields of every request to the servers"
    )
    group.add_argument("--prompts", metavar="FILE", help='your own prompts: lines of text, or of JSON with "prompt"')
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help="prompts per session (default: 8; from 8 sessions on 4)"
    )
    group.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="tokens of each prompt")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens generated after each")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    group.add_argument(
        "--services",
        choices=("grpc", "embedded"),
        default="grpc",
        help="processes over loopback, or everything in one process",
    )
    group.add_argument("--json", metavar="FILE", help="write every number to a file, too")
    group.add_argument("--plot", metavar="FILE", help="draw the speeds and latencies, as a PNG")
    add_deployment_flags(parser)
    parser.set_defaults(dtype="float32")


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a run found, ready to be shown."""

    title: str
    sections: Sequence[Section]
    notes: Sequence[str]
    #: Shown instead.
    yaml: str | None = None


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the files."""
    _check(args)
    _check_files(args)
    pyplot = load_pyplot() if args.plot else None
    tune_environment()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # no word about services that end as they should
    from rich.console import Console  # noqa: PLC0415

    # Where there is no terminal to ask, the tables get the width they need.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    report = asyncio.run(_measure_server(args) if args.url else _measure_here(args))
    from tandem.bench.chart import draw_report  # noqa: PLC0415
    from tandem.bench.report import print_report  # noqa: PLC0415

    if report.yaml is None:
        print_report(console, report.title, report.sections, report.notes)
    else:
        print(report.yaml, end="")
    if args.json:
        sections = [section.summary() for section in report.sections]
        arguments = {name: value for name, value in vars(args).items() if name != "client_key"}
        content = {"title": report.title, "notes": report.notes, "arguments": arguments, "sections": sections}
        Path(args.json).write_text(json.dumps(content, indent=1, default=str) + "\n")
    if pyplot is not None:
        draw_report(pyplot, report.title, report.sections, args.plot)
    return 0


def _check_files(args: argparse.Namespace) -> None:
    """Refuse before the measurement what could not be written after it."""
    for name in ("json", "plot"):
        folder = Path(getattr(args, name) or ".").parent
        if not folder.is_dir():
            raise InvalidRequest(f"--{name} names a file in {folder}, which is no folder; make it first", param=name)


def _check(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "prompt_tokens", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} is {value}; it must be at least 1", param=name)
    if min(args.batch_size) < 1:
        raise InvalidRequest(f"batch_size is {min(args.batch_size)}; it must be at least 1", param="batch_size")
    if args.url:
        if args.plain_url and (args.k is not None or args.rules):
            raise InvalidRequest("--plain-url compares two servers as they are; leave --k and --rules out", param="k")
        own = ("drafter", "pad_target", "compare", "speculative_config", "speculative_model")
        _refuse_beside(args, "url", *own, "acceptance_lengths", "synthetic_acceptance_length")
        return
    for name in ("plain_url", "extra_body"):
        if getattr(args, name):
            raise InvalidRequest(f"--{name.replace('_', '-')} is for a running server: give --url, too", param=name)
    length = args.synthetic_acceptance_length
    if length is not None:
        _refuse_beside(args, "synthetic_acceptance_length", "acceptance_lengths", "structured", "compare")
        if args.services != "grpc":
            raise InvalidRequest("--synthetic-acceptance-length needs a target of its own: leave --services out")
    if args.acceptance_lengths is not None:
        _refuse_beside(args, "acceptance_lengths", "structured", "compare", "plot", "k", "rules")
        if len(args.batch_size) > 1 or min(args.acceptance_lengths) < 1:
            raise InvalidRequest("--acceptance-lengths takes numbers from 1 on, and one --batch-size")
        args.text = args.text or (None if args.prompts else ALL_TASKS)
        args.k, args.fixed_draft_length = max(args.acceptance_lengths), True


def _check_lengths(args: argparse.Namespace, k: int, trees: Sequence[str]) -> None:
    pretended = args.synthetic_acceptance_length
    if pretended is not None and not 1 <= pretended <= k + 1:
        raise InvalidRequest(f"--synthetic-acceptance-length is {pretended:g}; with k = {k} it is 1 to {k + 1}")
    if trees and args.acceptance_lengths is not None:
        raise InvalidRequest(f"--acceptance-lengths is for chains, and {trees[0]} drafts trees; leave it out")


def _refuse_beside(args: argparse.Namespace, flag: str, *others: str) -> None:
    """Raise where one of some flags is given beside another one that it does not go with."""
    for name in others:
        if getattr(args, name):
            own, other = (each.replace("_", "-") for each in (flag, name))
            reason = "names a running server, which has its own models" if flag == "url" else "does not go with it"
            raise InvalidRequest(f"--{own} {reason}; leave --{other} out", param=name)


def json_object(text: str) -> dict[str, Any]:
    """For ``argparse``."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


async def _measure_here(args: argparse.Namespace) -> BenchReport:
    """Services of our own: everything is seen."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from specdec.process.cores import usable_cores  # noqa: PLC0415
    from tandem.bench.huggingface import HuggingFace  # noqa: PLC0415
    from tandem.bench.measure import Bench  # noqa: PLC0415
    from tandem.bench.plans import make_plans  # noqa: PLC0415
    from tandem.bench.report import machine_notes  # noqa: PLC0415
    from tandem.bench.systems import start_systems  # noqa: PLC0415

    deployments = _padded(deployments_of(args), args.pad_target)
    model = next(iter(deployments.values())).target.model
    drafted = {name: _drafts_of(deployment) for name, deployment in deployments.items()}
    k = max(drafted.values())
    trees = [name for name, each in deployments.items() if each.draft is not None and each.draft.speculative.tree]
    modes = [plain_mode(next(iter(deployments))), *speculative_modes(drafted, rules_of(args), trees)]
    tokenizer = TextTokenizer.load(model.tokenizer or model.model)
    plans = _with_schema(args, make_plans(args, lambda text: tuple(tokenizer.encode(text))))
    threads, pretended = model.num_threads or usable_cores(), args.synthetic_acceptance_length
    _check_lengths(args, k, trees)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(_progress())
        progress("loading the models", 0)
        systems = await stack.enter_async_context(start_systems(args.services, deployments, pretended))
        routers = {name: system.router for name, system in systems.items() if system.router is not None}
        drafts = {name: router.draft_model() for name, router in routers.items()}
        if args.acceptance_lengths is not None:
            modes, plans = length_modes(drafts, args.acceptance_lengths), [replace(plan, probes=()) for plan in plans]
        rival = None
        if args.compare:
            draft = next((d.draft.speculative.model for d in deployments.values() if d.draft), None)
            models = {"target": model.model, "draft": draft, "dtype": model.dtype, "device": model.device}
            rival = await HuggingFace.start({**models, "threads": threads, "k": k, "temperature": args.temperature})
            stack.push_async_callback(rival.close)
        is_greedy = not args.temperature and pretended is None
        bench = Bench(systems, modes, _params(args), rival, is_greedy=is_greedy)
        sections = await _run(args, bench, plans, progress)
        info = next(iter(routers.values())).model()
    sizes = [f"draft {each.num_parameters / 1e6:.1f} M" for each in drafts.values() if each and each.num_parameters]
    names = ", ".join(next(iter(deployments.values())).gateway.served_model_name)
    where = info.dtype if info.device == "cpu" else f"{info.dtype} on {info.device}"
    parts = [f"{names}: target {info.num_parameters / 1e6:.1f} M", *sizes, where, f"k = {k} at most"]
    services = f"services: {args.services}; target: {info.execution}"
    notes = [*_plan_notes(args, plans), services, *machine_notes(threads), *bench.notes]
    if pretended is not None:
        mark = f"SYNTHETIC ACCEPTANCE LENGTH {pretended:g}: whatever is drafted is accepted; texts are not the model's"
        parts, notes = [mark, *parts], [mark, *notes]
    title = ", ".join(parts)
    yaml = None if args.acceptance_lengths is None else yaml_of(names, modes, sections, [title, *notes])
    return BenchReport(title, sections, notes, yaml)


async def _measure_server(args: argparse.Namespace) -> BenchReport:
    """A running server: what its client sees."""
    from tandem.bench.measure import Bench  # noqa: PLC0415
    from tandem.bench.modes import BenchMode  # noqa: PLC0415
    from tandem.bench.plans import make_plans  # noqa: PLC0415
    from tandem.bench.remote import connect  # noqa: PLC0415

    plans = _with_schema(args, make_plans(args, None))
    k = args.num_speculative_tokens if args.k is None else args.k
    rules = rules_of(args)
    async with AsyncExitStack() as stack:
        remote = await stack.enter_async_context(connect(args.url, args.model, client_key(args), args.extra_body))
        systems = {"server": remote.system}
        if args.plain_url:
            plain = await stack.enter_async_context(connect(args.plain_url, None, client_key(args), args.extra_body))
            systems[PLAIN] = plain.system
            modes = [plain_mode(PLAIN), BenchMode("server", "server", None)]
        elif remote.is_tandem:
            modes = [plain_mode("server"), *speculative_modes({"server": k}, rules)]
        elif k is not None or rules != [None]:
            raise InvalidRequest("--k and --rules need a server of ours; this one decides itself", param="url")
        else:
            modes = [BenchMode("server", "server", None)]
        with _progress() as progress:
            is_greedy = not (args.extra_body or {}).get("temperature", args.temperature)
            sections = await _run(args, Bench(systems, modes, _params(args), is_greedy=is_greedy), plans, progress)
    notes = [*_plan_notes(args, plans), "as its client sees it"]
    if not remote.is_tandem:
        notes[-1] += "; pieces count as one token each where the server sends no token ids"
    if args.plain_url:
        notes.append(f"plain: {plain.name} at {args.plain_url}")
    return BenchReport(f"{remote.name} at {args.url}", sections, notes)


async def _run(
    args: argparse.Namespace, bench: Bench, plans: Sequence[Plan], progress: Callable[[str, int], None]
) -> list[Section]:
    if args.fixed_draft_length:  # a gateway that does not choose the length has nothing to learn
        bench.learning_s = 0.0
    progress("warming up", sum(bench.num_steps(plan) for plan in plans))
    bench.tell = lambda text: progress(text, 0)
    return [await bench.run(plan) for plan in plans]


def _with_schema(args: argparse.Namespace, plans: list[Plan]) -> list[Plan]:
    """The plans, and with ``--structured`` each again with answers of its schema."""
    if not args.structured:
        return plans
    from tandem.bench.schema import read_schema  # noqa: PLC0415

    language = read_schema(args.structured)
    return [each for plan in plans for each in (plan, replace(plan, language=language))]


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True)


def _drafts_of(deployment: Deployment) -> int:
    return deployment.gateway.num_speculative_tokens


def _padded(deployments: dict[str, Deployment], size: str | None) -> dict[str, Deployment]:
    """The same, the target padded where that was asked for."""
    if not size:
        return deployments
    from tandem.padding import pad_checkpoint, parse_size  # noqa: PLC0415 (torch)

    def padded(deployment: Deployment) -> Deployment:
        model, gateway = deployment.target.model, deployment.gateway
        folder = pad_checkpoint(model.model, parse_size(size))
        names = tuple(f"{name} padded to {size}" for name in gateway.served_model_name)
        return replace(
            deployment,
            target=replace(deployment.target, model=replace(model, model=folder)),
            gateway=replace(gateway, served_model_name=names),
        )

    return {name: padded(deployment) for name, deployment in deployments.items()}


def _plan_notes(args: argparse.Namespace, plans: Sequence[Plan]) -> list[str]:
    counts = ", ".join(dict.fromkeys(f"{len(plan.batches)} x {plan.num_sessions}" for plan in plans))
    if args.prompts:
        source = f"prompts of {args.prompts}"
    elif any(plan.text in TASKS for plan in plans):
        source = "prompts of the task suite"
    else:
        source = f"held-out prompts of {args.prompt_tokens} tokens"
    rules = args.rules or args.verification or "block"
    sampling = f"temperature {args.temperature:g}, rule {rules}" if args.temperature else "greedy"
    return [f"{counts} {source}, {args.max_tokens} new tokens each, {sampling}; prefill included"]


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A bar on standard error: called with what is being done, and once with the number of steps."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        begun = False

        def progress(text: str, total: int) -> None:
            nonlocal begun
            if total:
                begun = True
                bar.update(task, description=text, total=total, completed=0)
            else:
                bar.update(task, description=text, advance=1 if begun else 0)

        yield progress


if __name__ == "__main__":
    sys.exit("run it as: tandem bench")

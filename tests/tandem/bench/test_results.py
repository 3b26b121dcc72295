"""From answers to numbers, tables and a picture; no model runs here."""

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml
from rich.console import Console

from gateway.generation import Generation
from gateway.requests.types import GenerationChunk, GenerationRequest
from specdec.errors import InvalidRequest, Unavailable
from specdec.flags import Parser
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.structured_outputs import StructuredOutputsParams
from specdec.types import ModelInfo
from specdec.v1 import generation_service_pb2 as pb
from tandem.bench.answers import Piece, TimedAnswer, collect
from tandem.bench.break_even import curves_of
from tandem.bench.chart import draw_report
from tandem.bench.huggingface import HuggingFace
from tandem.bench.lengths import length_modes, yaml_of
from tandem.bench.measure import Bench
from tandem.bench.modes import BenchMode, deployments_of, plain_mode, speculative_modes
from tandem.bench.parts import RoundCosts
from tandem.bench.plans import Plan, make_plans
from tandem.bench.plot import load_pyplot
from tandem.bench.report import print_report
from tandem.bench.results import Measurement, Section
from tandem.bench.systems import EmbeddedSystem, metrics_of
from tandem.bench.tasks import TASKS
from tandem.cli import bench as command
from tandem.launcher.deployment import Deployment


def answer(*pieces: tuple[float, int], **speculation: object) -> TimedAnswer:
    made = tuple(Piece(at, count, "x" * count) for at, count in pieces)
    return TimedAnswer(0.0, made, sum(count for _, count in pieces), speculation)


def test_times_of_an_answer() -> None:
    seen = answer((0.5, 1), (1.5, 4), (2.0, 1))
    assert (seen.ttft_s, seen.wall_s, seen.decode_s, seen.num_steps) == (0.5, 2.0, 1.5, None)
    assert answer((0.5, 1), (1.5, 4), (2.0, 3), num_accepted_draft_tokens=4).num_steps == 3, "a piece may hold several"
    assert seen.gaps_s == [1.0, 0.5]
    assert seen.itl_s == [0.25, 0.25, 0.25, 0.25, 0.5], "the wait for a piece is shared by its tokens"
    assert seen.text == "xxxxxx"
    assert seen.decode_rate == pytest.approx(5 / 1.5)
    assert answer((0.5, 3)).decode_rate is None


async def test_collecting_pieces() -> None:
    async def pieces(*given: Piece) -> AsyncGenerator[Piece, None]:
        for piece in given:
            yield piece

    last = Piece(3.0, 0, "", {"num_spec_steps": 2}, num_tokens_in_all=9)
    collected = await collect(pieces(Piece(1.0, 2, "ab"), Piece(2.0, 1, "c"), last))
    assert (collected.num_tokens, len(collected.pieces), collected.text) == (9, 2, "abc"), "usage alone is no piece"
    assert collected.speculation == {"num_spec_steps": 2}
    with pytest.raises(Unavailable, match="without a token"):
        await collect(pieces(Piece(1.0, 0, "")))


def test_metrics_come_by_name() -> None:
    metrics = metrics_of(
        pb.SpeculationMetrics(num_spec_steps=3, acceptance_histogram=[1, 2], no_speculation_reason="off")
    )
    assert metrics["num_spec_steps"] == 3
    assert metrics["no_speculation_reason"] == "off"
    assert metrics["acceptance_histogram"] == [1, 2]
    assert metrics["num_rejections"] == 0


def section() -> Section:
    plain, drafted = Measurement(0), Measurement(4)
    for rate in (10.0, 20.0):
        plain.add_run(rate, [answer((0.1, 1), (0.2, 1), (0.3, 1))])
        drafted.add_run(
            2 * rate,
            [
                answer(
                    (0.1, 1),
                    (0.2, 5),
                    num_spec_steps=2,
                    num_draft_tokens=8,
                    num_accepted_draft_tokens=4,
                    num_rejections=1,
                    acceptance_histogram=[1, 0, 0, 0, 1],
                    draft_acceptance_rate=0.5,
                    num_wasted_draft_tokens=6,
                    draft_wait_ns=4_000_000,
                    draft_ns=3_000_000,
                    num_hidden_states=10,
                    hidden_state_bytes=1960,
                )
            ],
        )
    drafted.add_busy(2.0, [10**9, 5 * 10**8])
    drafted.costs = RoundCosts(decode_ms=4.0, verify_ms=5.0, draft_ms=0.5, wire_ms=1.0, wire_bytes=120.0)
    return Section(1, {"plain": plain, "draft_model": drafted})


def test_what_follows_from_known_numbers() -> None:
    both = section()
    drafted = both.modes["draft_model"]
    assert drafted.alpha == 8 / 10
    assert drafted.acceptance_length == 3.0
    assert drafted.mean_drafts == 4.0
    assert drafted.histogram == [2, 0, 0, 0, 2]
    assert drafted.acceptance_rates == [0.5, 0.5, 0.5, 0.5]
    assert drafted.round_ms == pytest.approx(100.0)
    assert (drafted.busy_share(0), drafted.busy_share(1), drafted.busy_share(2)) == (0.5, 0.25, None)
    assert drafted.costs is not None
    assert (drafted.costs.c, drafted.costs.d, drafted.costs.verify_ratio) == (0.125, 0.25, 1.25)
    speedup, decode_speedup, limits = both.speedup("draft_model"), both.decode_speedup("draft_model"), drafted.limits
    assert speedup is not None
    assert decode_speedup is not None
    assert limits is not None
    assert speedup.median == 2.0
    assert decode_speedup.median == pytest.approx(5.0), "5 tokens in 0.1 s, and 2 in 0.2 s"
    assert limits.serial == pytest.approx((1 - 0.8**5) / 0.2 / 1.75)
    assert limits.overlapped == pytest.approx((1 - 0.8**5) / 0.2)
    summary = json.loads(json.dumps(both.summary()))["modes"]["draft_model"]
    assert summary["share_of_overlapped_limit"] == pytest.approx(5.0 / limits.overlapped)
    assert both.modes["plain"].alpha is None
    assert both.modes["plain"].acceptance_rates == []
    drafted.is_tree = True
    assert drafted.limits is None, "those are of chains"


def test_tables_show_what_is_known_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    prose = section()
    prose.text = "prose"
    print_report(Console(width=120), "the title", [prose], ["a note"])
    lines = capsys.readouterr().out.splitlines()

    def cell(label: str) -> str:
        line = next(line for line in lines if label in line)
        return line.split("│")[2].strip()

    assert cell("α, acceptance per token") == "0.800"
    assert cell("drafts accepted") == "0.50 0.50 0.50 0.50"
    assert any(line.startswith("1 session, prose") for line in lines)
    assert cell("drafted tokens thrown away") == "3.00"
    assert cell("waiting for the draft") == "2.00 ms"
    assert cell("bytes of hidden states") == "196"
    assert cell("limit, serial") == f"{(1 - 0.8**5) / 0.2 / 1.75:.2f}x, 260%"
    assert cell("over plain from the first token on") == "5.00 (5.00–5.00)"
    assert not any("on the mode to the target" in line for line in lines), "not reported, so not shown"
    assert "a note" in lines


def test_acceptance_lengths_as_yaml() -> None:
    drafts = [ModelInfo(name="d", architecture="", vocab_size=8, max_model_len=8, num_speculative_tokens=2), None]
    modes = length_modes({"head": drafts[0], "suffix": drafts[1]}, (3, 1))
    assert [(mode.system, mode.k) for mode in modes] == [("head", 1), ("suffix", 1), ("suffix", 3)]
    lengths = {"head, k = 1": 1.5, "suffix, k = 3": 3.456}
    parts = []
    for task in ("code", "maths"):
        made = {mode.name: Measurement(mode.k) for mode in modes}
        for name, length in lengths.items():
            made[name].speculation = {"num_spec_steps": 1000, "num_accepted_draft_tokens": int(1000 * (length - 1))}
        parts.append(Section(1, made, task))
        lengths.pop("head, k = 1", None)
        lengths |= {"suffix, k = 1": 1.0}
    one, other = yaml.safe_load_all(yaml_of("model", modes, parts, ["a note"]))
    assert one == {"_metadata": {"drafter": "head"}, "model": {"code": {1: 1.5}}}
    assert other == {"_metadata": {"drafter": "suffix"}, "model": {"code": {3: 3.46}, "maths": {1: 1.0, 3: 3.46}}}


def test_a_mode_without_drafted_tokens_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    both = section()
    both.modes["plain"].add_run(5.0, [answer((0.1, 1), num_spec_steps=0, no_speculation_reason="off")])
    both.modes["ngram"] = Measurement(4)
    for reason in ("pacing", "no_proposal"):
        both.modes["ngram"].add_run(5.0, [answer((0.1, 1), num_spec_steps=0, no_speculation_reason=reason)])
    print_report(Console(width=120), "title", [both], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if "drafted tokens (" in line]
    assert lines == ["ngram: no round had drafted tokens (no_proposal, pacing)"]


def test_a_task_with_a_schema_is_a_section_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    free, bound = section(), section()
    free.text = bound.text = "maths"
    bound.language = StructuredOutputsParams(json={})
    bound.modes["plain"].num_fitting = 1
    print_report(Console(width=120), "title", [free, bound], [])
    printed = capsys.readouterr().out
    assert "answers that fit the schema: plain 1 of 2, draft_model 0 of 2" in printed
    assert printed.index("│ maths") < printed.index("1 session, maths, with the schema")


def test_a_server_that_reports_nothing_gets_speeds_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mode = Measurement(None)
    mode.add_run(5.0, [answer((0.1, 1), (0.2, 1))])
    alone = Section(2, {"server": mode})
    print_report(Console(width=120), "title", [alone], [])
    printed = capsys.readouterr().out
    assert "2 sessions" in printed
    assert "acceptance" not in printed
    draw_report(load_pyplot(), "title", [alone, section()], str(tmp_path / "both.png"))
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


class FakeSystem:
    """Answers at once and remembers in which order it was asked."""

    router = None

    def __init__(self, text: str = "x") -> None:
        self.text = text
        self.asked: list[tuple[object, int | None, Rule | None]] = []

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, rule: Rule | None, k: int | None
    ) -> AsyncGenerator[Piece, None]:
        self.asked.append((prompt, k, rule))
        for _ in range(params.max_tokens or 0):
            await asyncio.sleep(0)
            yield Piece(time.perf_counter(), 1, self.text)


async def test_modes_alternate_and_the_warm_up_does_not_count() -> None:
    system = FakeSystem()
    modes = [plain_mode("s"), *speculative_modes({"s": 4}, [Rule.BLOCK, Rule.COUPLED])]
    assert [mode.name for mode in modes] == ["plain", "s, block", "s, coupled"]
    steps: list[str] = []
    bench = Bench({"s": system}, modes, SamplingParams(max_tokens=3), tell=steps.append, learning_s=0.0)
    plan = Plan(warm_up=[["w"]], batches=[["a"], ["b"], ["c"]])
    measured = await bench.run(plan)
    assert [len(mode.rates) for mode in measured.modes.values()] == [3, 3, 3]
    assert len(steps) == bench.num_steps(plan) == len(system.asked) == 12
    assert [prompt for prompt, _, _ in system.asked] == [*"wwwaaabbbccc"]
    order = [(k, rule) for _, k, rule in system.asked]
    assert order[3:6] == [(4, Rule.BLOCK), (4, Rule.COUPLED), (0, None)]
    assert order[6:9] == [(4, Rule.COUPLED), (0, None), (4, Rule.BLOCK)]
    assert len(measured.modes["plain"].ttft_s) == 3
    assert len(measured.modes["plain"].itl_s) == 6


class LoopingSystem(FakeSystem):
    """A broken replay: with drafts its text repeats itself, which drafts foresee."""

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, rule: Rule | None, k: int | None
    ) -> AsyncGenerator[Piece, None]:
        is_wrong = bool(k) and prompt in {"b", "c"}
        counts = {"num_spec_steps": 2, "num_accepted_draft_tokens": 8 if is_wrong else 1, "num_rejections": 1}
        speculation = counts | {"acceptance_histogram": [0, 0, 2] if is_wrong else [1, 1]}
        yield Piece(time.perf_counter(), 1, "a")
        yield Piece(time.perf_counter(), 1, "a" if is_wrong else "b", speculation if k else {})


async def test_text_that_differs_from_plain_decoding_counts_for_no_gain(capsys: pytest.CaptureFixture[str]) -> None:
    modes = [plain_mode("s"), *speculative_modes({"s": 4}, [None])]
    plan = Plan(warm_up=[], batches=[["a"], ["b"], ["a"]])

    async def measured(*, is_greedy: bool, text: str | None = None) -> Section:
        params = SamplingParams(max_tokens=2)
        bench = Bench({"s": LoopingSystem()}, modes, params, is_greedy=is_greedy, learning_s=0.0)
        return await bench.run(replace(plan, text=text))

    unguarded = (await measured(is_greedy=False)).modes["s"]
    assert unguarded.acceptance_length == 1 + 10 / 6, "what the guard is for"
    section = await measured(is_greedy=True)
    drafted = section.modes["s"]
    assert (drafted.num_compared, drafted.num_differing, drafted.differing_runs) == (3, 1, {1})
    assert drafted.acceptance_length == 1 + 2 / 4
    assert drafted.histogram == [2, 2, 0]
    plain = section.modes["plain"]
    section.modes["s"].rates, plain.rates = [2.0, 99.0, 2.0], [1.0, 1.0, 1.0]
    speedup = section.speedup("s")
    assert speedup is not None
    assert (speedup.low, speedup.high) == (2.0, 2.0)
    print_report(Console(width=200), "title", [section], [])
    assert "1 session, s: 1 of 3 answers are not those of plain decoding" in capsys.readouterr().out
    summary = section.summary()
    summary["text"] = "maths"
    (_, curve) = curves_of([summary])
    assert curve.ratios[1].spread.high == 2.0

    plan = Plan(warm_up=[], batches=[["b"], ["c"]])
    section = await measured(is_greedy=True)
    drafted = section.modes["s"]
    assert section.speedup("s") is section.decode_speedup("s") is drafted.alpha is drafted.acceptance_length is None
    (_, curve) = curves_of([section.summary() | {"text": "maths"}])
    assert curve.ratios == {}
    assert curve.break_even is None


async def test_answers_of_a_schema() -> None:
    """What ends at the limit of tokens but fits was not cut off. Hugging Face knows no schemas and is left out."""
    rival = cast("HuggingFace", SimpleNamespace(modes=lambda _: ["hf"]))
    language = StructuredOutputsParams(json={"type": "number"})
    plan = Plan(warm_up=[], batches=[["a"]], language=language)
    for text, counts in (("1", (1, 0)), ("-", (0, 1))):
        bench = Bench({"s": FakeSystem(text)}, [plain_mode("s")], SamplingParams(max_tokens=3), rival)
        measured = await bench.run(plan)
        assert [*measured.modes] == ["plain"]
        assert (measured.modes["plain"].num_fitting, measured.modes["plain"].num_cut_off) == counts
        assert bench.num_steps(plan) == 1


def test_one_rule_needs_no_name() -> None:
    assert speculative_modes({"ngram": 3}, [None]) == [BenchMode("ngram", "ngram", 3)]
    both = speculative_modes({"chains": 3, "trees": 7}, [None], ["trees"])
    assert [mode.is_tree for mode in both] == [False, True]


async def test_no_mode_finds_what_another_one_has_computed() -> None:
    asked: list[GenerationRequest] = []

    class Asked:
        router = None

        async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
            asked.append(request)
            return
            yield

    systems = [EmbeddedSystem(cast("Generation", Asked())) for _ in range(2)]
    for system, k, rule in ((0, 0, None), (0, 4, None), (0, 4, Rule.BLOCK), (1, 4, None), (0, 4, None)):
        async for _ in systems[system].stream("a", SamplingParams(), rule, k):
            pass
    salts = [request.cache_salt for request in asked]
    assert len(set(salts)) == 4
    assert salts[1] == salts[4]


def test_drafters_by_name() -> None:
    parser = Parser()
    command.add_arguments(parser)

    def named(*argv: str) -> dict[str, Deployment]:
        return deployments_of(parser.parse_args(argv))

    every = named("--drafter", "all", "--k", "7")
    assert {"draft_model", "ngram", "suffix", "suffix+draft_model"} <= set(every)
    chains = [deployment.gateway for name, deployment in every.items() if not name.endswith("-tree")]
    assert {gateway.num_speculative_tokens for gateway in chains} == {7}
    both = every["suffix+draft_model"]
    assert (both.gateway.lookup, both.draft and both.draft.speculative.method) == (("suffix",), "draft_model")
    config = '{"method": "suffix", "suffix_decoding_max_tree_depth": 12}'
    (name, deployment), *_ = named("--speculative-config", config, "--drafter", "suffix,ngram").items()
    depth = deployment.gateway.lookup_settings.suffix_decoding_max_tree_depth
    assert (name, depth, deployment.gateway.num_speculative_tokens) == ("suffix", 12, 12)
    assert list(named("--speculative-config", config)) == ["suffix"]
    assert list(named("--drafter", "ngram,eagle3=python-12m-eagle3,suffix+eagle3")) == [
        "ngram",
        "eagle3",
        "suffix+eagle3",
    ]
    tree = named("--drafter", "draft_model-tree,ngram", "--k", "3")
    draft = tree["draft_model-tree"].draft
    assert draft is not None
    assert (draft.speculative.tree_top_k, draft.speculative.num_speculative_tokens) == (2, 7)
    assert (tree["ngram"].draft, tree["ngram"].gateway.num_speculative_tokens) == (None, 3)
    given = '{"method": ["ngram", "draft_model"], "model": "python-1m"}'
    assert list(named("--speculative-config", given)) == ["ngram+draft_model"]


def options(**changes: object) -> Namespace:
    usual = {"prompts": None, "num_prompts": None, "prompt_tokens": 8, "max_tokens": 16, "batch_size": (1, 8)}
    return Namespace(**(usual | {"text": None, "drafter": None, "fixed_draft_length": False} | changes))


def test_prompts_of_a_plan_are_never_used_twice() -> None:
    few, many = make_plans(options(), lambda text: tuple(text.encode()))
    assert (few.num_sessions, len(few.batches), many.num_sessions, len(many.batches)) == (1, 8, 8, 4)
    batches = [*few.warm_up, *few.batches, *few.probes, *many.warm_up, *many.batches, *many.probes]
    used = [prompt for batch in batches for prompt in batch]
    assert len(used) == len(set(used)) == 13 + 8 * 9
    (text,) = make_plans(options(batch_size=(2,), num_prompts=3), None)
    assert len(text.batches) == 3
    assert not text.probes
    assert all(isinstance(prompt, str) for batch in text.batches for prompt in batch)


def test_own_prompts_are_all_measured(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("a\nb\nc\n")
    (plan,) = make_plans(options(prompts=str(file), batch_size=(2,)), lambda text: tuple(text.encode()))
    assert plan.text is None
    assert {prompt for batch in plan.batches for prompt in batch} == {(97,), (98,), (99,)}
    with pytest.raises(InvalidRequest, match="leave --text out"):
        make_plans(options(prompts=str(file), text="prose"), None)


def test_all_drafters_are_compared_on_the_task_suite() -> None:
    plans = make_plans(options(drafter="all", batch_size=(1,), num_prompts=2), None)
    assert [plan.text for plan in plans] == [*TASKS]
    assert all(plan.warm_up for plan in plans)
    fixed = make_plans(options(drafter="all", batch_size=(1,), num_prompts=2, fixed_draft_length=True), None)
    assert [bool(plan.warm_up) for plan in fixed] == [True, *[False] * 10], "nothing is learned"
    assert [plan.batches for plan in fixed] == [plan.batches for plan in plans]
    with pytest.raises(InvalidRequest, match="poems; choose from prose, tasks, code"):
        make_plans(options(text="prose,poems"), None)


async def test_parts_that_could_not_be_timed_are_told_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_parts(*_: object) -> RoundCosts:
        raise Unavailable("the target verified less")

    class Served(FakeSystem):
        router = object()

    monkeypatch.setattr("tandem.bench.measure.time_parts", no_parts)
    monkeypatch.setattr(Bench, "_busy_ns", lambda *_: asyncio.sleep(0, []))
    bench = Bench(
        {"s": Served()}, [plain_mode("s"), *speculative_modes({"s": 4}, [None])], SamplingParams(max_tokens=3)
    )
    measured = await bench.run(Plan(warm_up=[], batches=[["a"]], probes=[[(1,)]]))
    assert [mode.costs for mode in measured.modes.values()] == [None, None]
    assert len(measured.modes["plain"].rates) == 1
    assert bench.notes == ["s, 1 sessions: no parts of a round, the target verified less"]


async def test_a_way_that_drafts_is_warmed_up_for_a_while() -> None:
    system = FakeSystem()
    bench = Bench(
        {"s": system},
        [plain_mode("s"), *speculative_modes({"s": 4}, [None])],
        SamplingParams(max_tokens=1),
        learning_s=0.05,
    )
    measured = await bench.run(Plan(warm_up=[["w"]], batches=[["a"]]))
    asked = [(prompt, k) for prompt, k, _ in system.asked]
    assert asked.count(("w", 0)) == asked.count(("a", 0)) == asked.count(("a", 4)) == 1
    assert asked.count(("w", 4)) > 2
    assert [len(mode.rates) for mode in measured.modes.values()] == [1, 1]

"""How many drafted tokens are accepted after short and long contexts, and what does a draft cost there?

The target writes its greedy continuation of each prompt once. Then every drafter is asked for it round by round, as a
gateway asks, with the target's hidden states where it reads them: of every proposal the tokens that agree are accepted,
and one more is committed. So acceptance does not depend on the speed of the machine. ``prefill`` and ``round`` are
times of the drafter alone; ``blocks`` are the KV blocks that the session holds.

Each drafter is measured as configured, and once for each ``--windows``. With ``--speed`` requests are timed over gRPC,
plain decoding and all drafters in turn on the same prompts; a ratio is over plain decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import command
from specdec.flags import Parser
from specdec.params import SamplingParams
from specdec.settings import DraftSettings, ModelSettings
from specdec.types import HiddenStates, SessionSpec
from tandem.bench.modes import deployments_of

if TYPE_CHECKING:
    from draft_service.drafters.base import Drafter
    from tandem.bench.systems import System
    from tandem.launcher.deployment import Deployment

Tokens = tuple[int, ...]

DRAFTERS: Final = "draft_model,eagle3,mlp_speculator"
_PREFILL_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's continuation of it."""

    prompt: Tokens
    output: Tokens
    #: Layers → the states of all positions but the last.
    states: Mapping[tuple[int, ...], HiddenStates]


@dataclass(slots=True)
class ContextResult:
    """What one drafter did after prompts of one length."""

    drafter: str
    context: int
    accepted: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    blocks: int = 0
    #: Speed over plain decoding on the same prompt.
    ratios: list[float] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round."""
        return 1 + statistics.fmean(self.accepted)

    def __str__(self) -> str:
        median = statistics.median
        speed = f"{median(self.ratios):8.2f}x" if self.ratios else ""
        return (
            f"{self.context:8}  {self.drafter:32}{self.acceptance_length:7.2f}{median(self.prefill_tokens):9.0f}"
            f"{median(self.prefill_ms):9.1f} ms{median(self.round_ms):8.2f} ms"
            f"{statistics.fmean(self.round_ms):8.2f} ms{self.blocks:8}{speed}"
        )


def write_texts(
    settings: ModelSettings, prompts: Sequence[Tokens], num_tokens: int, layers: Sequence[tuple[int, ...]]
) -> list[Text]:
    """The target's greedy continuations of prompts, with its hidden states of every set of layers."""
    from specdec.engine.engine import Engine  # noqa: PLC0415 (torch)

    engine = Engine.load(settings)
    try:
        return [_write_text(engine, prompt, num_tokens, layers) for prompt in prompts]
    finally:
        engine.close()


def _write_text(engine: Any, prompt: Tokens, num_tokens: int, layers: Sequence[tuple[int, ...]]) -> Text:
    from specdec.engine.engine import Segment  # noqa: PLC0415 (torch)

    sequence = engine.pool.open(len(prompt) + num_tokens)
    token_ids, fed = list(prompt), list(prompt)
    while True:
        for start in range(0, len(fed), _PREFILL_ROWS):
            logits = engine.forward([Segment(sequence, fed[start : start + _PREFILL_ROWS], 1)])
        fed = [int(logits[-1].argmax())]
        token_ids += fed
        if len(token_ids) == len(prompt) + num_tokens:
            break
    states = {}
    for wanted in layers:
        engine.pool.rollback(sequence, 0)
        data = b""
        for start in range(0, len(token_ids) - 1, _PREFILL_ROWS):
            rows = token_ids[start : min(start + _PREFILL_ROWS, len(token_ids) - 1)]
            _, of_pass = engine.forward_with_states([Segment(sequence, rows, 0, len(rows), wanted)])
            data += of_pass.bytes_of(0, range(len(rows)))
        states[wanted] = HiddenStates(0, len(wanted) * engine.hidden_size, "bfloat16", data)
    engine.pool.release(sequence)
    return Text(prompt, tuple(token_ids[len(prompt) :]), states)


async def play(drafter: Drafter[Any], text: Text, k: int, result: ContextResult) -> None:
    """Let a drafter draft a text round by round."""
    from draft_service.drafters.base import DraftJob  # noqa: PLC0415 (torch)

    params = SamplingParams(temperature=0.0, seed=0, max_tokens=len(text.output) + k)
    spec = SessionSpec(session_id="", token_ids=text.prompt, prompt_len=len(text.prompt), params=params)
    states = text.states.get(drafter.info.hidden_state_layers)
    state = drafter.open(spec)
    known, rest = len(text.prompt), text.output
    started = time.perf_counter()
    drafter.advance(state, known, rest[:1], [states.rows(0, known)] if states else [])
    result.prefill_tokens.append(state.num_pending)
    while state.num_pending:
        await drafter.draft([DraftJob(state, min(state.num_pending, _PREFILL_ROWS), 0)])
    result.prefill_ms.append(1e3 * (time.perf_counter() - started))
    known, rest = known + 1, rest[1:]
    while rest:
        started = time.perf_counter()
        num_tokens = max(0, min(k, drafter.room(state), len(rest)))
        draft = (await drafter.draft([DraftJob(state, state.num_pending, num_tokens)]))[0]
        accepted = common_prefix_len(draft.token_ids, rest)
        committed = rest[: accepted + 1]
        rows = [states.rows(known - 1, known - 1 + len(committed))] if states else []
        drafter.advance(state, known, committed, rows)
        result.round_ms.append(1e3 * (time.perf_counter() - started))
        result.accepted.append(accepted)
        known, rest = known + len(committed), rest[len(committed) :]
    result.blocks = max(result.blocks, drafter.occupancy()[0])
    drafter.close(state)


async def replay(
    settings: DraftSettings, name: str, texts: Mapping[int, Sequence[Text]], k: int
) -> list[ContextResult]:
    """One drafter at every length of context."""
    from draft_service.drafters.registry import load_drafter  # noqa: PLC0415 (torch)

    drafter = await load_drafter(settings)
    try:
        results = []
        for context, of_length in texts.items():
            await play(drafter, of_length[0], k, ContextResult(name, context))  # not counted: everything is warm then
            result = ContextResult(name, context)
            for text in of_length:
                await play(drafter, text, k, result)
            results.append(result)
        return results
    finally:
        await drafter.shutdown()


async def time_requests(
    systems: Mapping[str, System], texts: Mapping[int, Sequence[Text]], results: Mapping[tuple[str, int], ContextResult]
) -> None:
    """Add the speeds over plain decoding; all systems share the target."""
    for context, of_length in texts.items():
        for number, text in enumerate(of_length):
            params = SamplingParams(temperature=0.0, max_tokens=len(text.output), ignore_eos=True)
            plain = await _speed(next(iter(systems.values())), text.prompt, params, 0)
            for name in list(systems)[:: 1 if number % 2 else -1]:
                speed = await _speed(systems[name], text.prompt, params, None)
                results[name, context].ratios.append(speed / plain)


async def _speed(system: System, prompt: Tokens, params: SamplingParams, k: int | None) -> float:
    """Tokens per second from the first one on."""
    times = []
    async with aclosing(system.stream(prompt, params, None, k)) as pieces:
        async for piece in pieces:
            times += [piece.at] * piece.num_tokens
    return (len(times) - 1) / (times[-1] - times[0])


def deployment_of(target: str, config: Mapping[str, Any], dtype: str) -> Deployment:
    """Services for a target and a ``speculative_config``."""
    choice = choose_models(find_checkpoint(target), read_speculation(config, target=target) or SpeculativeSettings())
    return make_deployment(choice, ModelSettings(model=choice.target, dtype=dtype))


def name_of(config: Mapping[str, Any]) -> str:
    """The method and the values of other options."""
    return ", ".join(str(value) if key == "method" else f"{key} {value}" for key, value in config.items())


async def measure(args: argparse.Namespace) -> list[ContextResult]:
    """Every drafter at every length, and with ``--speed`` over gRPC."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.bench.systems import start_systems  # noqa: PLC0415 (gRPC)

    configs = args.speculative_config or [{"method": method} for method in METHODS]
    deployments = {name_of(config): deployment_of(args.target, config, args.dtype) for config in configs}
    model = next(iter(deployments.values())).target.model
    encode = TextTokenizer.load(model.model).encode
    layers = {method: layers_of(each) for method, each in deployments.items()}
    wanted = sorted({each for each in layers.values() if each})
    prompts = {context: pick_prompts(encode, args.num_prompts, context, seed=3) for context in args.contexts}
    texts = {
        context: write_texts(model, of_length, args.max_tokens, wanted) for context, of_length in prompts.items()
    }
    results: list[ContextResult] = []
    for name, deployment in deployments.items():
        assert deployment.draft is not None
        k = deployment.draft.speculative.num_speculative_tokens
        results += await replay(deployment.draft, name, texts, k)
    if args.speed:
        async with start_systems("grpc", deployments) as systems:
            await time_requests(systems, texts, {(each.drafter, each.context): each for each in results})
    return sorted(results, key=lambda each: each.context)


def main() -> int:
    """Measure, print, write."""
    flags = Parser("python -m benchmarks.contexts", description=__doc__)
    flags.add_argument("--target", default=TARGET, help="folder or bundled name")
    flags.add_argument("-sc", "--speculative-config", type=json.loads, action="append", help="one drafter; repeat it")
    flags.add_argument("--contexts", type=command.numbers, default=(128, 1024, 1920), help="tokens of the prompts")
    flags.add_argument("--num-prompts", type=int, default=16, help="of each length")
    flags.add_argument("--max-tokens", type=int, default=96, help="tokens after each prompt")
    flags.add_argument("--dtype", default="float32", help="of all models")
    flags.add_argument("--speed", action="store_true", help="time requests over gRPC, too")
    flags.add_argument("--json", metavar="FILE", help="write the numbers to a file, too")
    args = flags.parse_args()
    results = asyncio.run(measure(args))
    print(f"{'context':>8}  {'drafter':40}{'length':>7}{'prefill':>9}{'':12}{'round':>10}{'mean':>11}{'blocks':>8}")
    for result in results:
        print(result)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    command.run("benchmarks.contexts", main)

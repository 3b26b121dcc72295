"""The run: after a warm-up every mode sees every prompt once, mode after mode; then the parts of a round are timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.errors import Unavailable
from specdec.params import SamplingParams
from tandem.bench.answers import TimedAnswer, collect
from tandem.bench.huggingface import HuggingFace
from tandem.bench.modes import BenchMode
from tandem.bench.parts import time_parts
from tandem.bench.plans import Plan, Prompt
from tandem.bench.results import Measurement, Section
from tandem.bench.schema import fits
from tandem.bench.systems import System


@dataclass(slots=True)
class Bench:
    """The systems, the modes to measure on them, and what else takes part."""

    systems: Mapping[str, System]
    modes: Sequence[BenchMode]
    params: SamplingParams
    rival: HuggingFace | None = None
    #: Whether every mode has to give the text of plain decoding.
    is_greedy: bool = False
    #: Called after every batch of every mode, with what comes next in words.
    tell: Callable[[str], None] = field(default=lambda _: None)
    #: Seconds of each warm-up batch of a mode that drafts. The gateway measures in them what drafting is worth here.
    learning_s: float = 4.0
    #: What could not be measured, and why.
    notes: list[str] = field(default_factory=list)

    def num_steps(self, plan: Plan) -> int:
        """How often ``tell`` will be called."""
        num_modes = len(self.modes) + len(self._rival_modes(plan))
        num_parts = len(self._drafting()) if plan.probes else 0
        return num_modes * (len(plan.warm_up) + len(plan.batches)) + num_parts

    async def run(self, plan: Plan) -> Section:
        """Modes alternate on each batch; another one begins each time."""
        modes = {mode.name: Measurement(mode.k, is_tree=mode.is_tree) for mode in self.modes}
        section = Section(plan.num_sessions, modes, plan.text, plan.language)
        params = self.params
        if plan.language is not None:
            params = replace(params, structured_outputs=plan.language, ignore_eos=False)
        section.modes.update({mode: Measurement(0) for mode in self._rival_modes(plan)})
        names = list(section.modes)
        discarded = {name: Measurement(0) for name in names}
        drafting = {mode.name for mode in self._drafting()}
        for number, batch in enumerate([*plan.warm_up, *plan.batches]):
            warms_up = number < len(plan.warm_up)
            start = number % len(names)
            answers: dict[str, Sequence[TimedAnswer]] = {}
            for name in names[start:] + names[:start]:
                begun = time.perf_counter()
                into = (discarded if warms_up else section.modes)[name]
                answers[name] = await self._measure(name, batch, params, into)
                while warms_up and name in drafting and time.perf_counter() - begun < self.learning_s:
                    await self._measure(name, batch, params, discarded[name])
                self.tell(f"{plan.num_sessions} sessions, {'warm-up' if warms_up else name}")
            if self.is_greedy and not warms_up:
                section.compare(answers)
        for mode in self._drafting() if plan.probes else ():
            router = self.systems[mode.system].router
            assert router is not None
            assert mode.k is not None
            try:
                section.modes[mode.name].costs = await time_parts(router, plan.probes, params, mode.rule, mode.k)
            except Unavailable as error:
                self.notes.append(f"{mode.name}, {plan.num_sessions} sessions: no parts of a round, {error}")
            self.tell(f"{plan.num_sessions} sessions, parts of a round")
        return section

    async def _measure(
        self, name: str, batch: Sequence[Prompt], params: SamplingParams, into: Measurement
    ) -> Sequence[TimedAnswer]:
        """The answers; none of Hugging Face, which tells its speed alone."""
        mode = next((mode for mode in self.modes if mode.name == name), None)
        if mode is None:
            assert self.rival is not None
            max_tokens = params.max_tokens or 1
            prompts = [prompt for prompt in batch if not isinstance(prompt, str)]
            into.add_run(len(batch) * max_tokens / await self.rival.run(name, prompts, max_tokens))
            return ()
        system = self.systems[mode.system]
        before = await self._busy_ns(system)
        started = time.perf_counter()
        streams = [system.stream(prompt, params, mode.rule, mode.k) for prompt in batch]
        answers = await asyncio.gather(*map(collect, streams))
        wall_s = time.perf_counter() - started
        into.add_run(sum(answer.num_tokens for answer in answers) / wall_s, answers)
        if params.structured_outputs is not None:
            others = [answer for answer in answers if not fits(answer.text, params.structured_outputs)]
            into.num_fitting += len(answers) - len(others)
            into.num_cut_off += sum(answer.num_tokens == params.max_tokens for answer in others)
        after = await self._busy_ns(system)
        into.add_busy(wall_s, [now - then for now, then in zip(after, before, strict=True)])
        return answers

    async def _busy_ns(self, system: System) -> list[int]:
        """What the target, and the draft where there is one, have worked since they started."""
        if system.router is None:
            return []
        router = system.router
        target = await router.targets.usable[0].backend.load()
        drafts = [await replica.backend.load() for replica in router.drafts.usable]
        return [load.busy_ns for load in (target, *drafts)]

    def _rival_modes(self, plan: Plan) -> Sequence[str]:
        """Hugging Face's, which do not know schemas."""
        return () if self.rival is None or plan.language is not None else self.rival.modes(plan.num_sessions)

    def _drafting(self) -> list[BenchMode]:
        return [mode for mode in self.modes if mode.speculates]

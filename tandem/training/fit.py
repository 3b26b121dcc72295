"""The optimisation of a student on its lessons, measured on held-out text while it runs, resumable at any time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn.functional import smooth_l1_loss
from tqdm.auto import tqdm

from specdec.errors import InternalError, TandemError
from tandem.training.acceptance import AcceptanceRates, greedy_acceptance
from tandem.training.checkpoint import save_state
from tandem.training.lesson import Lessons, distillation_loss
from tandem.training.lesson_store import lesson_batches
from tandem.training.optimizer import OptimizerSettings, PairedOptimizer
from tandem.training.schedule import Schedule, ScheduleSettings
from tandem.training.settings import TrainSettings
from tandem.training.student import Student
from tandem.training.unroll import Guess

#: Weight of EAGLE-1's regression: Li et al. 2024 give it ten times that of the cross entropy.
REGRESSION_WEIGHT = 10.0
#: Rows of held-out text at a time.
EVAL_ROWS = 16


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of the trained steps, and greedy acceptance, after a number of steps."""

    step: int
    loss: float
    acceptance: AcceptanceRates


def lesson_loss(student: Student, lesson: Lessons, settings: TrainSettings) -> torch.Tensor:
    """Mean loss over the steps of the chains, each weighing `step_decay` times what the one before weighs."""
    taught = lesson if student.to_draft is None else lesson.restrict(student.to_draft)
    with torch.autocast(lesson.rows.device.type, torch.bfloat16):
        guesses = student.guesses(lesson, student.num_steps)
        return mean_loss([step_loss(guess, lesson, taught, settings) for guess in guesses], settings)


def step_loss(guess: Guess, lesson: Lessons, taught: Lessons, settings: TrainSettings) -> torch.Tensor:
    """The loss of one step; `taught` is the lesson over the student's vocabulary."""
    loss = distillation_loss(
        guess.logits.float(),
        guess.answers(taught),
        settings.loss_weights,
        None if guess.confidence is None else guess.confidence.float(),
    )
    if settings.method == "eagle" and guess.features is not None:
        states = guess.answers(lesson).states
        weight = REGRESSION_WEIGHT if settings.regression_weight is None else settings.regression_weight
        loss = loss + weight * smooth_l1_loss(guess.features.float(), states)
    return loss


def mean_loss(losses: Sequence[torch.Tensor], settings: TrainSettings) -> torch.Tensor:
    """The steps' losses, weighted."""
    weights = [settings.step_decay**step for step in range(len(losses))]
    return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)


@torch.inference_mode()
def measure(student: Student, held_out: Lessons, settings: TrainSettings, end_id: int | None, step: int) -> Evaluation:
    """Loss and acceptance on held-out rows: prompts of `prompt_length` that the target continued greedily."""
    depth = min(settings.num_speculative_tokens, student.max_steps or settings.num_speculative_tokens)
    first = settings.prompt_length - 1  # the position whose state gave the first token the target wrote
    device = next(student.module.parameters()).device
    losses, hits, sizes = [], [], []
    student.module.eval()
    for index in torch.split(torch.arange(len(held_out)), EVAL_ROWS):
        lesson = held_out.select(index, device)
        taught = lesson if student.to_draft is None else lesson.restrict(student.to_draft)
        step_losses, steps = [], []
        with torch.autocast(device.type, torch.bfloat16):
            for guess in student.guesses(lesson, max(depth, student.num_steps)):
                steps.append(guess.logits.argmax(-1) == guess.answers(taught).top_ids[..., 0])
                if len(steps) <= student.num_steps:
                    step_losses.append(step_loss(guess, lesson, taught, settings))
        losses.append(mean_loss(step_losses, settings).item() * len(index))
        hits.append(torch.stack(steps[:depth], -1)[:, first:].cpu())
        sizes.append(_countable(lesson.rows[:, settings.prompt_length :].cpu(), hits[-1].shape[1], end_id))
    student.module.train()
    acceptance = greedy_acceptance(torch.cat(hits), torch.cat(sizes))
    return Evaluation(step, sum(losses) / len(held_out), acceptance)


def _countable(written: torch.Tensor, most: int, end_id: int | None) -> torch.Tensor:
    """Positions to draft from until a row's end-of-text token, which is the last that counts: int64 [B]."""
    if end_id is None:
        return torch.full((len(written),), most)
    ended = (written == end_id).int()
    ends = torch.where(ended.any(-1), ended.argmax(-1), written.shape[1])
    return ends.clamp_max(most)


class Fit:
    """One training: its student, optimizer and schedule, and where they are kept."""

    def __init__(self, student: Student, settings: TrainSettings, state_path: Path, max_minutes: float = 0.0) -> None:
        """Takes up the state at `state_path` where there is one. `max_minutes` from now on; 0 is no limit."""
        self.student = student
        self.settings = settings
        self.state_path = state_path
        table_rate = settings.table_rate or settings.rate * (1.0 if settings.method == "draft" else 0.25)
        rates = OptimizerSettings(matrix_rate=settings.rate, other_rate=table_rate, weight_decay=settings.weight_decay)
        self.optimizer = PairedOptimizer(student.module, rates, student.vocab_sizes)
        self.schedule = Schedule(
            ScheduleSettings(
                num_steps=settings.num_steps,
                warmup_steps=settings.warmup_steps,
                decay_share=settings.decay_share,
                max_minutes=max_minutes,
            )
        )
        self.history: list[Evaluation] = []
        if state_path.exists():
            self._load()

    def run(self, parts: Sequence[Lessons], held_out: Lessons, end_id: int | None) -> None:
        """Makes all steps that are left.

        Raises:
            TandemError: the loss is no number any more.
        """
        settings, schedule = self.settings, self.schedule
        device = next(self.student.module.parameters()).device
        batches = self._batches(parts)
        saved_s = time.monotonic()
        with tqdm(total=schedule.num_steps, initial=schedule.step, desc="training", dynamic_ncols=True) as bar:
            while not schedule.done:
                if schedule.step % settings.eval_steps == 0:
                    self._measure(held_out, end_id)
                part, index = next(batches)
                loss = lesson_loss(self.student, part.select(index, device), settings)
                loss.backward()  # type: ignore[no-untyped-call]
                norm = self.optimizer.step(schedule.factor())
                if not norm < float("inf"):
                    raise TandemError(f"the loss is no number any more after step {schedule.step}; try a lower rate")
                schedule.advance()
                bar.total = schedule.num_steps
                bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
                bar.update(1)
                if time.monotonic() - saved_s > 60 * settings.checkpoint_minutes:
                    self.save()
                    saved_s = time.monotonic()
        self._measure(held_out, end_id)
        self.save()

    def save(self) -> None:
        """Keeps all that is needed to continue, in one piece."""
        weights = {name: value.detach() for name, value in self.student.trainable().items()}
        state = {"weights": weights, "optimizer": self.optimizer.state_dict(), "step": self.schedule.step}
        save_state(self.state_path, state)

    def _load(self) -> None:
        state = torch.load(self.state_path, weights_only=True, map_location="cpu")
        parameters = self.student.trainable()
        if state["weights"].keys() != parameters.keys():
            raise InternalError(f"{self.state_path} holds another drafter")
        for name, parameter in parameters.items():
            parameter.data.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.step = state["step"]

    def _batches(self, parts: Sequence[Lessons]) -> Iterator[tuple[Lessons, torch.Tensor]]:
        settings = self.settings
        return islice(lesson_batches(parts, settings.batch_tokens, settings.seed), self.schedule.step, None)

    def _measure(self, held_out: Lessons, end_id: int | None) -> None:
        measured = measure(self.student, held_out, self.settings, end_id, self.schedule.step)
        self.history.append(measured)
        tqdm.write(
            f"step {measured.step}: held-out loss {measured.loss:.3f}, acceptance length {measured.acceptance}",
        )

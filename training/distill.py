"""Distilling the draft from the target, on corpus text and on text the target continued."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from training.checkpoint import load_model, round_weights, save_model, save_state
from training.corpus import load_documents
from training.lesson import Lessons, distillation_loss, write_lessons
from training.optimizer import OptimizerSettings, PairedOptimizer
from training.schedule import Schedule, ScheduleSettings
from training.shape import DRAFT
from training.tokenizer import MAX_LENGTH, encode_documents, load_tokenizer, pack_rows


@dataclass(frozen=True)
class DistillSettings:
    """The two extra losses are explained at `distillation_loss`."""

    schedule: ScheduleSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    batch_tokens: int = 4096
    greedy_weight: float = 0.3
    variation_weight: float = 0.5
    seed: int = 20241
    bfloat16: bool = True
    compiled: bool = True
    checkpoint_minutes: float = 4.0
    state_path: Path | None = None


def lesson_batches(parts: Sequence[Lessons], batch_tokens: int, seed: int) -> Iterator[Lessons]:
    """Endless batches of about `batch_tokens`, each from one part; an epoch visits every row."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        batches: list[tuple[Lessons, torch.Tensor]] = []
        for part in parts:
            num_rows = max(1, batch_tokens // part.rows.shape[1])
            order = torch.randperm(len(part), generator=generator)
            batches += [(part, index) for index in torch.split(order, num_rows) if len(index) == num_rows]
        if not batches:
            raise ValueError(f"no part has enough rows for a batch of {batch_tokens} tokens")
        for i in torch.randperm(len(batches), generator=generator).tolist():
            part, index = batches[i]
            yield part.select(index)


def lesson_loss(draft: LlamaForCausalLM, lesson: Lessons, settings: DistillSettings) -> torch.Tensor:
    """One forward of the draft over a selected lesson, and its loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
        logits = draft(input_ids=lesson.rows, use_cache=False).logits  # [B, T, V]
    return distillation_loss(
        logits.float(),
        lesson,
        greedy_weight=settings.greedy_weight,
        variation_weight=settings.variation_weight,
    )


def distill(draft: LlamaForCausalLM, parts: Sequence[Lessons], settings: DistillSettings) -> int:
    """Trains `draft` in place on the parts, epoch after epoch; returns the tokens seen."""
    optimizer = PairedOptimizer(draft, settings.optimizer, (draft.config.vocab_size,))
    schedule = Schedule(settings.schedule)
    batches = lesson_batches(parts, settings.batch_tokens, settings.seed)
    loss_of = torch.compile(lesson_loss, dynamic=False, disable=not settings.compiled)
    num_tokens, saved_s = 0, time.monotonic()
    while not schedule.done:
        lesson = next(batches)
        loss = loss_of(draft, lesson, settings)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = optimizer.step(schedule.factor())
        num_tokens += lesson.rows.numel()
        schedule.advance()
        if schedule.step % 20 == 0:
            print(
                f"{time.strftime('%H:%M:%S')} step {schedule.step}/{schedule.num_steps} "
                f"loss {loss.item():.3f} norm {norm:.2f} factor {schedule.factor():.3f}",
                flush=True,
            )
        if settings.state_path and time.monotonic() - saved_s > 60 * settings.checkpoint_minutes:
            saved_s = time.monotonic()
            save_state(settings.state_path, {"model": draft.state_dict(), "step": schedule.step})
    return num_tokens


def main() -> None:
    """Writes the lessons, trains the draft on them and saves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("build/training/python-12m"))
    parser.add_argument("--generated", type=Path, default=Path("build/training/generated.pt"))
    parser.add_argument("--out", type=Path, default=Path("build/training/python-1m"))
    parser.add_argument("--start-from", type=Path, default=None, help="a draft to train on")
    parser.add_argument("--corpus-rows", type=int, default=700, help=f"of {MAX_LENGTH} tokens")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--max-minutes", type=float, default=0.0)
    parser.add_argument("--batch-tokens", type=int, default=DistillSettings.batch_tokens)
    parser.add_argument("--rate", type=float, default=OptimizerSettings.matrix_rate)
    parser.add_argument("--decay-share", type=float, default=ScheduleSettings.decay_share)
    parser.add_argument("--greedy-weight", type=float, default=DistillSettings.greedy_weight)
    parser.add_argument("--variation-weight", type=float, default=DistillSettings.variation_weight)
    parser.add_argument("--seed", type=int, default=DistillSettings.seed)
    parser.add_argument("--state", type=Path, default=None, help="file for checkpoints")
    parser.add_argument("--no-compile", action="store_true", help="start at once, run slower")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started_s = time.monotonic()
    target, tokenizer = load_model(arguments.target), load_tokenizer(arguments.target)
    texts = encode_documents(tokenizer, load_documents()[0], with_chat=True)
    generator = torch.Generator().manual_seed(arguments.seed)
    corpus_rows = pack_rows(texts, MAX_LENGTH, generator)[: arguments.corpus_rows]
    parts = [write_lessons(target, rows) for rows in (corpus_rows, torch.load(arguments.generated)) if len(rows)]
    spent_minutes = (time.monotonic() - started_s) / 60
    draft = (
        load_model(arguments.start_from)
        if arguments.start_from
        else LlamaForCausalLM(DRAFT.config(tokenizer.eos_token_id))
    )
    settings = DistillSettings(
        schedule=ScheduleSettings(
            num_steps=arguments.steps,
            decay_share=arguments.decay_share,
            max_minutes=arguments.max_minutes and max(1.0, arguments.max_minutes - spent_minutes),
        ),
        optimizer=OptimizerSettings(matrix_rate=arguments.rate, other_rate=arguments.rate),
        batch_tokens=arguments.batch_tokens,
        greedy_weight=arguments.greedy_weight,
        variation_weight=arguments.variation_weight,
        seed=arguments.seed,
        compiled=not arguments.no_compile,
        state_path=arguments.state,
    )
    num_tokens = distill(draft, parts, settings)
    round_weights(draft)
    save_model(draft, tokenizer, arguments.out)
    print(f"{num_tokens} tokens seen; saved to {arguments.out}")


if __name__ == "__main__":
    main()

"""Training the target on the corpus: next-token prediction on packed rows."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedModel

from tandem.checkpoints import find_checkpoint
from tandem.training.checkpoint import load_model, round_weights, save_model, save_state
from tandem.training.corpus import load_documents
from tandem.training.hybrid import grow_hybrid
from tandem.training.optimizer import OptimizerSettings, PairedOptimizer
from tandem.training.schedule import Schedule, ScheduleSettings
from tandem.training.shape import TARGET
from tandem.training.tokenizer import encode_documents, load_tokenizer, pack_rows


@dataclass(frozen=True)
class PretrainSettings:
    """Lengths and batch sizes count tokens; long rows are used while the rate decays."""

    schedule: ScheduleSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    batch_tokens: int = 6144
    row_length: int = 512
    long_row_length: int = 2048
    seed: int = 20240
    bfloat16: bool = True
    compiled: bool = True
    checkpoint_minutes: float = 4.0
    state_path: Path | None = None


def row_batches(texts: Sequence[torch.Tensor], length: int, num_rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches int64 [num_rows, length + 1], epoch after epoch in a fresh order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = pack_rows(texts, length + 1, generator)
        if len(rows) < num_rows:
            raise ValueError(f"{len(rows)} rows of {length} tokens: too few for {num_rows}")
        for start in range(0, len(rows) - num_rows + 1, num_rows):
            yield rows[start : start + num_rows]


def next_token_loss(model: PreTrainedModel, rows: torch.Tensor, *, bfloat16: bool) -> torch.Tensor:
    """Mean nats per token of rows int64 [B, T + 1], T predictions each."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits  # [B, T, V]
    return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def pretrain(model: PreTrainedModel, texts: Sequence[torch.Tensor], settings: PretrainSettings) -> int:
    """Trains what has gradients of a fresh model (or resumes from the state file); returns the tokens seen."""
    optimizer = PairedOptimizer(model, settings.optimizer, (model.config.vocab_size,))
    schedule = Schedule(settings.schedule)
    counts = {False: 0, True: 0}  # batches seen of short and of long rows
    if settings.state_path and settings.state_path.exists():
        state = torch.load(settings.state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.step, counts = state["step"], state["counts"]
    lengths = {False: settings.row_length, True: settings.long_row_length}
    batches = {
        long: islice(
            row_batches(texts, size, settings.batch_tokens // size, settings.seed + long),
            counts[long],
            None,
        )
        for long, size in lengths.items()
    }
    # Two shapes, each compiled for itself (about a minute); a step is then a fifth shorter.
    loss_of = torch.compile(next_token_loss, dynamic=False, disable=not settings.compiled)
    saved_s = time.monotonic()
    while not schedule.done:
        long = schedule.in_decay
        loss = loss_of(model, next(batches[long]), bfloat16=settings.bfloat16)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = optimizer.step(schedule.factor())
        counts[long] += 1
        schedule.advance()
        if schedule.step % 10 == 0:
            print(
                f"{time.strftime('%H:%M:%S')} step {schedule.step}/{schedule.num_steps} "
                f"loss {loss.item():.3f} norm {norm:.2f} factor {schedule.factor():.3f}",
                flush=True,
            )
        if settings.state_path and time.monotonic() - saved_s > 60 * settings.checkpoint_minutes:
            saved_s = time.monotonic()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_state(settings.state_path, {**state, "step": schedule.step, "counts": counts})
    return settings.batch_tokens * sum(counts.values())


def parse_arguments() -> Any:
    """The command line; defaults remake the bundled target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("build/training/tokenizer"))
    parser.add_argument("--out", type=Path, default=Path("build/training/python-12m"))
    parser.add_argument("--state", type=Path, default=None, help="file to resume from")
    parser.add_argument("--hybrid", metavar="LLAMA", help="train recurrent layers between those of this model instead")
    parser.add_argument("--steps", type=int, default=1650)
    parser.add_argument("--warmup-steps", type=int, default=ScheduleSettings.warmup_steps)
    parser.add_argument("--max-minutes", type=float, default=0.0)
    parser.add_argument("--batch-tokens", type=int, default=PretrainSettings.batch_tokens)
    parser.add_argument("--long-row-length", type=int, default=PretrainSettings.long_row_length)
    parser.add_argument("--rate", type=float, default=OptimizerSettings.matrix_rate)
    parser.add_argument("--weight-decay", type=float, default=OptimizerSettings.weight_decay)
    parser.add_argument("--decay-share", type=float, default=ScheduleSettings.decay_share)
    parser.add_argument("--no-compile", action="store_true", help="start at once, run slower")
    parser.add_argument("--seed", type=int, default=PretrainSettings.seed)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Trains the target and saves it."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.tokenizer)
    texts = encode_documents(tokenizer, load_documents()[0], with_chat=True)
    settings = PretrainSettings(
        schedule=ScheduleSettings(
            num_steps=arguments.steps,
            warmup_steps=arguments.warmup_steps,
            decay_share=arguments.decay_share,
            max_minutes=arguments.max_minutes,
        ),
        optimizer=OptimizerSettings(
            matrix_rate=arguments.rate,
            other_rate=arguments.rate,
            weight_decay=arguments.weight_decay,
        ),
        batch_tokens=arguments.batch_tokens,
        long_row_length=arguments.long_row_length,
        seed=arguments.seed,
        compiled=not arguments.no_compile,
        state_path=arguments.state,
    )
    print(f"{sum(map(len, texts))} tokens an epoch", flush=True)
    torch.manual_seed(settings.seed)
    model: PreTrainedModel = LlamaForCausalLM(TARGET.config())
    if arguments.hybrid:
        model = grow_hybrid(load_model(Path(find_checkpoint(arguments.hybrid))))
    num_tokens = pretrain(model, texts, settings)
    round_weights(model)
    save_model(model, tokenizer, arguments.out)
    print(f"{num_tokens} tokens seen; saved to {arguments.out}")


if __name__ == "__main__":
    main()

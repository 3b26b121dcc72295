"""``tandem train``: a drafter for a target, from the target's own text: a draft head or a small model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specdec.errors import InvalidRequest
from specdec.flags import default_of
from tandem.checkpoints import TARGET, find_checkpoint
from tandem.launcher.environment import tune_environment

#: Method → what is trained.
_METHODS: Final[Mapping[str, str]] = {
    "eagle3": "a head on three of the target's hidden states, with a vocabulary of its own",
    "eagle": "EAGLE-1 and -2: a head on the target's last hidden state",
    "medusa": "one head per position ahead, all on the target's last hidden state",
    "mlp": "an MLP speculator: the target's last hidden state, taking in one drafted token after the other",
    "draft": "a small causal language model, distilled from the target",
}
#: Group → flag → its help. Names and defaults are those of the settings.
_FLAGS: Final[Mapping[str, Mapping[str, str]]] = {
    "shape (what is not given follows from the target)": {
        "hidden_size": "eagle3, draft: hidden size",
        "intermediate_size": "eagle, eagle3, draft: size of the MLP",
        "num_heads": "eagle, eagle3, draft: attention heads",
        "num_kv_heads": "eagle, eagle3, draft: key-value heads",
        "head_dim": "eagle, eagle3, draft: size of an attention head",
        "num_layers": "draft: layers (2); medusa: residual blocks of a head (1)",
        "draft_vocab_size": "eagle3: tokens that can be drafted, the most frequent ones (32000 at most)",
        "num_predict": "medusa: heads; mlp: steps (4)",
        "inner_dim": "mlp: size of the state",
        "tie_weights": "mlp: all steps share their weights",
    },
    "lessons": {
        "num_rows": "rows of text",
        "row_length": "tokens of a row",
        "prompt_length": "tokens of data a row begins with; the target writes the others",
        "data_share": "share of the rows that is data alone",
        "temperature": "of the half of the written rows that is not greedy",
        "num_held_out_rows": "rows of held-out text, for measuring",
    },
    "training": {
        "num_steps": "optimisation steps",
        "batch_tokens": "tokens of a step",
        "unroll_steps": "eagle, eagle3: steps of a chain that are trained (4)",
        "step_decay": "weight of a step's loss in that of the step before",
        "rate": "peak learning rate",
        "table_rate": "that of embeddings and output layers (a quarter of it in heads, which start from the target's)",
        "weight_decay": "of matrices",
        "warmup_steps": "steps over which the rate rises",
        "decay_share": "share of the steps over which the rate falls to zero",
        "greedy_weight": "weight of the cross entropy of the target's choice",
        "variation_weight": "weight of the total variation",
        "regression_weight": "eagle: weight of the distance to the target's next hidden state (10)",
        "max_minutes": "wall-clock limit of everything; the rate falls sooner then; 0 is none",
        "num_speculative_tokens": "drafted tokens a round where acceptance is measured",
        "eval_steps": "steps between measurements on held-out text",
        "checkpoint_minutes": "minutes between checkpoints",
        "seed": "of initial weights, prompts, sampling and order",
        "device": '"auto", "cpu" or "cuda:N"; on a GPU all is computed in bfloat16',
        "num_threads": "threads on a CPU; all cores where not given",
        "resume": "go on with an interrupted training of the same output",
        "keep_lessons": "keep OUTPUT.training, which holds lessons and state, when all is done",
    },
}
_NUMBERS: Final[Mapping[str, type]] = {"regression_weight": float, "table_rate": float}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The method, where to read and write, and every option of :class:`tandem.training.settings.TrainSettings`."""
    from tandem.training.settings import TrainSettings  # noqa: PLC0415 (only this command needs it)

    listed = "; ".join(f"{name}: {text}" for name, text in _METHODS.items())
    parser.add_argument("method", choices=list(_METHODS), metavar="METHOD", help=listed)
    parser.add_argument("--target", default=TARGET, metavar="DIR", help=f"the target (default: {TARGET})")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text files, .jsonl or .json with text or messages, or folders of them; for the bundled target Python's"
        " standard library where not given",
    )
    parser.add_argument(
        "--held-out",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text to measure on; a part of the data where not given",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--start-from", metavar="DIR", help="a drafter of the same method to train on")
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for name, text in flags.items():
            default = default_of(TrainSettings, name)
            flag = "--" + name.replace("_", "-")
            if isinstance(default, bool):
                group.add_argument(flag, action="store_true", help=text)
                continue
            kind = str if isinstance(default, str) else _NUMBERS.get(name, int) if default is None else type(default)
            shown = "" if default is None else f" (default: {default})"
            group.add_argument(flag, type=kind, default=default, metavar="N", help=text + shown)
    parser.add_argument(
        "--layers",
        metavar="I,I,I",
        help="eagle3: hidden states to read, i being the input of layer i",
    )


def run(args: argparse.Namespace) -> int:
    """Train, and say what came out."""
    tune_environment()
    from transformers.utils import logging  # noqa: PLC0415 (slow to import)

    from tandem.training.drafter import train_drafter, work_folder  # noqa: PLC0415
    from tandem.training.settings import TrainSettings  # noqa: PLC0415

    names = [name for flags in _FLAGS.values() for name in flags]
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    settings = TrainSettings(
        method=args.method,
        target=args.target,
        output=args.output,
        data=tuple(args.data),
        held_out=tuple(args.held_out),
        start_from=args.start_from,
        layers=_layers(args.layers),
        **options,
    )
    folder = find_checkpoint(settings.target)
    start = find_checkpoint(settings.start_from) if settings.start_from else None
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        last = train_drafter(replace(settings, target=folder, start_from=start))[-1]
    except KeyboardInterrupt:
        print(f"interrupted; what is done lies in {work_folder(settings)}: the same command with --resume goes on")
        raise
    k = len(last.acceptance.rates)
    print(f"{settings.output}: held-out loss {last.loss:.3f}, acceptance length {last.acceptance}, k = {k}, greedy")
    return 0


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"layers is {text!r}; write numbers with commas, such as 2,16,29", param="layers"
        ) from None

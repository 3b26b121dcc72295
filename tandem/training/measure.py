"""Measurements on the held-out files: loss of a model, acceptance length of a pair or of a head.

No speculative loop runs here. Verification leaves the target's text as it is, so the target
writes its text alone and the draft is then asked, in one forward pass, what it would have
proposed at each position of it.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.methods import METHODS, method_of
from tandem.training.acceptance import AcceptanceRates
from tandem.training.checkpoint import load_model
from tandem.training.continuations import continue_rows
from tandem.training.corpus import Document, load_documents
from tandem.training.fit import measure
from tandem.training.lesson import write_lessons
from tandem.training.settings import TrainSettings
from tandem.training.student import layers_read, make_student
from tandem.training.tokenizer import encode_documents, load_tokenizer

NUM_SPECULATIVE_TOKENS = 4


@dataclass(frozen=True)
class MeasureSettings:
    """Lengths count tokens; prompts are taken from the middle of each text."""

    prompts_per_text: int = 2
    prompt_length: int = 128
    num_tokens: int = 128
    window: int = 1024
    seed: int = 3


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[Document],
    window: int = MeasureSettings.window,
) -> tuple[float, float]:
    """Nats per token and bits per byte, each file read in windows of at most `window` tokens."""
    end = torch.tensor([tokenizer.eos_token_id])
    nats, num_tokens = 0.0, 0
    for text in encode_documents(tokenizer, documents, with_chat=False):
        ids = torch.cat([end, text])
        for start in range(0, len(text), window):
            row = ids[start : start + window + 1][None]
            log_probs = model(input_ids=row[:, :-1], use_cache=False).logits.log_softmax(-1)
            nats -= log_probs.gather(-1, row[:, 1:, None]).sum().item()
            num_tokens += row.shape[1] - 1
    num_bytes = sum(len(d.text.encode()) for d in documents)
    return nats / num_tokens, nats / math.log(2) / num_bytes


def draw_held_out_prompts(texts: Sequence[torch.Tensor], settings: MeasureSettings) -> torch.Tensor:
    """Evenly spaced windows of each long enough text: int64 [num_prompts, prompt_length]."""
    length, count = settings.prompt_length, settings.prompts_per_text
    prompts = [
        text[start : start + length]
        for text in texts
        if len(text) >= 2 * length
        for start in ((len(text) - length) * (i + 1) // (count + 1) for i in range(count))
    ]
    return torch.stack(prompts)


def count_rounds(accepted: Sequence[bool], k: int) -> int:
    """Rounds that commit `len(accepted)` tokens when token i passes if proposed.

    A round commits the proposals up to the first rejected one, and one token of the target's
    own: the correction, or after k accepted ones the bonus token, which nobody proposed.
    """
    position = num_rounds = 0
    while position < len(accepted):
        end = position
        while end < len(accepted) and end - position < k and accepted[end]:
            end += 1
        position = end + 1
        num_rounds += 1
    return num_rounds


@torch.inference_mode()
def acceptance_length(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: torch.Tensor,
    *,
    num_tokens: int,
    temperature: float,
    k: int = NUM_SPECULATIVE_TOKENS,
    seed: int = MeasureSettings.seed,
) -> float:
    """Mean tokens per round over the continuations of prompts int64 [B, P].

    Greedy (temperature 0): a proposal passes if it is the target's token. Otherwise a token
    drawn from p was a passed proposal with probability min(1, q / p), which is the joint law
    of token and acceptance in Leviathan et al. 2023, algorithm 1. A text ends at its
    end-of-text token.
    """
    generator = torch.Generator().manual_seed(seed)
    length = prompts.shape[1]
    temperatures = torch.full((len(prompts),), temperature)
    rows = continue_rows(target, prompts, num_tokens, temperatures, generator)
    written = rows[:, length:, None]  # [B, num_tokens, 1]
    logits = [model(input_ids=rows[:, :-1], logits_to_keep=num_tokens).logits.float() for model in (target, draft)]
    if temperature == 0:
        accepted = logits[1].argmax(-1) == written[..., 0]
    else:
        log_p, log_q = ((x / temperature).log_softmax(-1).gather(-1, written) for x in logits)
        passing = (log_q - log_p).exp()[..., 0]
        accepted = torch.rand(passing.shape, generator=generator) < passing
    end = target.config.eos_token_id
    num_committed = num_rounds = 0
    for ids, flags in zip(written[..., 0].tolist(), accepted.tolist(), strict=True):
        size = ids.index(end) + 1 if end in ids else len(ids)
        num_committed += size
        num_rounds += count_rounds(flags[:size], k)
    return num_committed / num_rounds


def measure_head(target_folder: Path, head_folder: Path, prompts: torch.Tensor, num_tokens: int) -> AcceptanceRates:
    """Greedy acceptance of a published head over the target's continuations of prompts int64 [B, P]."""
    method = METHODS[method_of(str(head_folder))].training_name
    assert method is not None  # all heads have one
    length = prompts.shape[1]
    settings = TrainSettings(
        method=method,
        target=str(target_folder),
        output=str(head_folder),
        start_from=str(head_folder),
        prompt_length=length,
        row_length=length + num_tokens,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
    )
    target = load_model(target_folder)
    generator = torch.Generator().manual_seed(settings.seed)
    rows = continue_rows(target, prompts, num_tokens, torch.zeros(len(prompts)), generator)
    lessons = write_lessons(target, rows, layers_read(settings, target))
    student = make_student(settings, target, torch.zeros(target.config.vocab_size))
    end_id = load_tokenizer(target_folder).eos_token_id
    return measure(student, lessons, settings, end_id, 0).acceptance


def measure_pair(target_folder: Path, draft_folder: Path) -> dict[str, float]:
    """Every figure of the model card, by name."""
    settings = MeasureSettings()
    target, draft = load_model(target_folder), load_model(draft_folder)
    tokenizer = load_tokenizer(target_folder)
    documents = load_documents()[1]
    figures: dict[str, float] = {}
    for name, model in (("target", target), ("draft", draft)):
        figures[f"{name}_parameters"] = model.num_parameters()
        loss = held_out_loss(model, tokenizer, documents, settings.window)
        figures[f"{name}_nats_per_token"], figures[f"{name}_bits_per_byte"] = loss
    texts = encode_documents(tokenizer, documents, with_chat=False)
    prompts = draw_held_out_prompts(texts, settings)
    figures["num_prompts"] = len(prompts)
    for name, temperature in (("greedy", 0.0), ("temperature_1", 1.0)):
        figures[f"acceptance_length_{name}"] = acceptance_length(
            target, draft, prompts, num_tokens=settings.num_tokens, temperature=temperature
        )
    return figures


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description="Measures a pair on the held-out files.")
    parser.add_argument("--target", type=Path, default=Path("build/training/python-12m"))
    parser.add_argument("--draft", type=Path, default=Path("build/training/python-1m"))
    parser.add_argument("--head", type=Path, default=None, help="a head to measure instead of the pair")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.head:
        settings = MeasureSettings()
        texts = encode_documents(load_tokenizer(arguments.target), load_documents()[1], with_chat=False)
        prompts = draw_held_out_prompts(texts, settings)
        print(f"greedy: {measure_head(arguments.target, arguments.head, prompts, settings.num_tokens)}")
        return
    figures = measure_pair(arguments.target, arguments.draft)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()

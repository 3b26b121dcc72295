"""Text continued by the target itself: what the draft will meet when it serves."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from training.checkpoint import load_model
from training.corpus import load_documents
from training.tokenizer import encode_documents, load_tokenizer


@dataclass(frozen=True)
class GenerateSettings:
    """Lengths count tokens. Half of the rows are greedy, half sampled at `temperature`."""

    num_rows: int = 4096
    prompt_length: int = 64
    row_length: int = 256
    batch_rows: int = 128
    temperature: float = 1.0
    seed: int = 7


@torch.inference_mode()
def continue_rows(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    num_tokens: int,
    temperatures: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Appends `num_tokens` to prompts int64 [B, P]; temperatures float32 [B], 0 is greedy."""
    cache = DynamicCache(config=model.config)
    rows, fed = [prompts], prompts
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)[:, None]
    for _ in range(num_tokens):
        output = model(input_ids=fed, past_key_values=cache, logits_to_keep=1)
        logits = output.logits[:, -1].float()  # [B, V]
        drawn = torch.multinomial((logits / scale).softmax(-1), 1, generator=generator)
        fed = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
        rows.append(fed)
    return torch.cat(rows, dim=1)


def draw_prompts(texts: Sequence[torch.Tensor], count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random windows of `texts` as int64 [count, length]; texts weigh by their length."""
    stream = torch.cat(list(texts))
    starts = torch.randint(len(stream) - length, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)]


def generate_rows(model: PreTrainedModel, texts: Sequence[torch.Tensor], settings: GenerateSettings) -> torch.Tensor:
    """Prompts from `texts`, each continued to `row_length`: int64 [num_rows, row_length]."""
    generator = torch.Generator().manual_seed(settings.seed)
    size = settings.batch_rows
    temperatures = torch.zeros(size)
    temperatures[size // 2 :] = settings.temperature
    batches = []
    for start in range(0, settings.num_rows, size):
        prompts = draw_prompts(texts, size, settings.prompt_length, generator)
        num_tokens = settings.row_length - settings.prompt_length
        batches.append(continue_rows(model, prompts, num_tokens, temperatures, generator))
        print(f"{time.strftime('%H:%M:%S')} {start + size}/{settings.num_rows} rows", flush=True)
    return torch.cat(batches)[: settings.num_rows]


def main() -> None:
    """Generates rows with the saved target and stores them."""
    defaults = GenerateSettings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("build/training/python-12m"))
    parser.add_argument("--out", type=Path, default=Path("build/training/generated.pt"))
    parser.add_argument("--rows", type=int, default=defaults.num_rows)
    parser.add_argument("--batch-rows", type=int, default=defaults.batch_rows)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts = encode_documents(load_tokenizer(arguments.target), load_documents()[0], with_chat=True)
    settings = GenerateSettings(num_rows=arguments.rows, batch_rows=arguments.batch_rows, seed=arguments.seed)
    rows = generate_rows(load_model(arguments.target), texts, settings)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(rows.to(torch.int16), arguments.out)


if __name__ == "__main__":
    main()

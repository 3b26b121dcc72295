"""Text continued by the target itself: what the draft will meet when it serves."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel


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

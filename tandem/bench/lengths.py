"""Acceptance lengths by drafter, task and number of drafted tokens, in the form of InferenceX's reference values.

Its ``golden_al_distribution/*.yaml`` have a file for each model and drafter: under the model's name a mapping for each
mode of thinking, here for each task, from drafted tokens a round to the acceptance length, with two decimals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from specdec.types import ModelInfo
from tandem.bench.modes import BenchMode
from tandem.bench.results import Section

#: Drafted tokens a round.
COUNTS: Final = tuple(range(1, 9))


def length_modes(drafters: Mapping[str, ModelInfo | None], counts: Sequence[int]) -> list[BenchMode]:
    """A mode for each drafter and number of drafted tokens, as far as it can draft so many; None: a lookup."""
    return [
        BenchMode(f"{name}, k = {k}", name, k)
        for name, info in drafters.items()
        for k in sorted(counts)
        if info is None or k <= info.num_speculative_tokens
    ]


def yaml_of(model: str, modes: Sequence[BenchMode], sections: Sequence[Section], notes: Sequence[str]) -> str:
    """A document for each drafter; a number of tokens that no round drafted is left out."""
    documents = []
    for drafter in dict.fromkeys(mode.system for mode in modes):
        comments = [
            "Acceptance Length (AL): 1 + accepted draft tokens / rounds that verified any",
            *notes,
            "key = num_speculative_tokens; value = AL",
        ]
        lines = [*(f"# {comment}" for comment in comments), f"_metadata:\n  drafter: {drafter}\n{model}:"]
        for section in sections:
            lengths = {mode.k: section.modes[mode.name].acceptance_length for mode in modes if mode.system == drafter}
            known = [f"    {k}: {length:.2f}" for k, length in lengths.items() if length is not None]
            lines += [f"  {section.text or 'prompts'}:", *known] if known else []
        documents.append("\n".join(lines) + "\n")
    return "---\n".join(documents)

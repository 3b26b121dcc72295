"""The self-check of models with recurrent states past their chunks: one text that is run, in uneven pieces.

States cannot be made up, as :mod:`engine.loading.long_context` does with keys and values: a text of random tokens is
computed twice, by the stock model at once and by an engine in pieces. It is longer than what transformers' code takes
together, than every window and convolution, and than the records that an engine keeps of a state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedModel

from engine.batch import Segment
from engine.layers import LayerShape
from engine.loading.long_context import MAX_ENTRIES
from engine.mixers import Mixer
from engine.recurrent.convolution import ConvolutionShape
from engine.recurrent.slots import NUM_RECORDS

if TYPE_CHECKING:
    from engine.engine import Engine

#: Tokens that transformers' delta rules take together; configurations do not name them.
_CHUNK: Final = 64
#: Lengths that configurations name.
_CHUNK_NAMES: Final = ("chunk_size", "mamba_chunk_size", "block_size")
#: Rows of a piece that are compared at most.
_ROWS: Final = 64
#: Tokens that are fed and rolled back.
_REJECTED: Final = 4
#: Pieces that follow the first; one has more rows than there are records.
_BEYOND: Final = (1, _REJECTED, 1, NUM_RECORDS + 4, 2, 3)
#: Room that a text needs at least.
SHORTEST: Final = 16


def border_of(model: PreTrainedModel, shapes: Sequence[LayerShape], mixers: Sequence[Mixer], length: int) -> int:
    """The largest number of entries beyond which a row may be computed otherwise, 4096 and some at most; ``length`` is
    one that is known.
    """
    config = model.config.get_text_config(decoder=True)
    chunks = (value for name in _CHUNK_NAMES if isinstance(value := getattr(config, name, None), int))
    windows = (shape.window for shape in shapes if shape.window is not None)
    taps = (shape.taps for mixer in mixers for shape in mixer.shapes if isinstance(shape, ConvolutionShape))
    known = (length, _CHUNK, NUM_RECORDS, *chunks, *windows, *taps)
    return max(size for size in known if size <= MAX_ENTRIES)


class LongText:
    """Random tokens and what the stock model answers to the last rows of each piece."""

    def __init__(self, model: PreTrainedModel, border: int, *, room: int, vocab_size: int) -> None:
        """Run the stock model on a text beyond ``border`` entries, of ``room`` entries at most.

        The first piece ends two entries before the border.
        """
        room -= _REJECTED
        before = min(border - 2, max(1, room - sum(_BEYOND)))
        self.pieces: list[int] = []
        for size in (before, *_BEYOND):
            self.pieces.append(max(0, min(size, room - sum(self.pieces))))
        generator = torch.Generator().manual_seed(23)
        self._token_ids = torch.randint(vocab_size, (sum(self.pieces),), generator=generator).tolist()
        self._vocab_size = vocab_size
        rows = torch.cat([torch.arange(end - min(size, _ROWS), end) for size, end in self._ends()]).to(model.device)
        options: dict[str, Any] = {"use_cache": False}
        if is_chosen := "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = rows
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([self._token_ids], device=model.device), **options).logits[0]
            self._logits: torch.Tensor = (logits if is_chosen else logits[rows]).float()

    @property
    def length(self) -> int:
        """Entries of the text."""
        return len(self._token_ids)

    def feed(self, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the pieces to an engine: its logits, and those of the stock model, [rows, V] each."""
        pool, answers = engine.pool, []
        sequence = pool.open(self.length + _REJECTED)
        try:
            for size, end in self._ends():
                tokens, num_rows = self._token_ids[end - size : end], min(size, _ROWS)
                rejected = [(token + 1) % self._vocab_size for token in tokens[:_REJECTED]] if size == _REJECTED else []
                logits = engine.forward([Segment(sequence, tokens + rejected, num_rows + len(rejected))])
                answers.append(logits[:num_rows].clone())
                if rejected:
                    pool.rollback(sequence, end)
        finally:
            pool.release(sequence)
        return torch.cat(answers), self._logits

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Tokens of each piece, and of it and those before."""
        for i, size in enumerate(self.pieces):
            if size:
                yield size, sum(self.pieces[: i + 1])

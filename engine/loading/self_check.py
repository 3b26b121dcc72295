"""The check every model passes at load: fed ragged and in chunks, it must answer as transformers' own forward does.

What the configuration and the recording pass cannot show (positions ignored, state carried from row to row outside
attention, a kernel that is wrong for some shape) shows here, on two sequences of different lengths that cross a block
boundary, with trees among their chunks: a few forward passes of a few dozen rows. What shows in long texts only is left
to :mod:`engine.loading.long_context` and, of recurrent states, :mod:`engine.loading.long_text`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch
from transformers import PreTrainedModel

from engine.adapters import is_adopted
from engine.batch import Segment
from engine.compaction import Kept
from engine.cuda.float8 import Float8Linear
from engine.kv_sequence import KVSequence
from engine.layers import LayerShape
from engine.loading.long_context import (
    MAX_ENTRIES,
    MIN_ENTRIES,
    PATH_ROWS,
    TREE_PARENTS,
    LongContext,
    keeps_what_is_paged,
    tree_of,
)
from engine.loading.long_text import SHORTEST, LongText, border_of
from engine.mixers import Mixer
from engine.native.rounded import GroupedLinear
from engine.trimmed_outputs import drafted_tokens
from specdec.errors import ModelNotSupported

if TYPE_CHECKING:
    from engine.engine import Engine

#: Instead of a number of tokens: a tree with three tokens on its path.
_TREE: Final = -len(PATH_ROWS)
#: Tokens of each sequence per step. Most rows stand next to a chunk's edge, where carried state would be lost.
_CHUNKS: Final = ((1, 2, 29, _TREE, 2, 1, 1, 1), (5, 1, _TREE, 1, 11, 2, 1))
#: How many times farther than usual the worst row may be where not all must be as usual: of the tests' random models in
#: half precision it is 2.2.
_WORST: Final = 6.0
#: The distance of a row whose token went to another expert, in half precision: 0.73 at most with random models.
#: Attention itself has no such rows, see :mod:`engine.loading.kernel_check`.
OTHER_EXPERT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Distances of rows of logits, relative to the logits' spread."""

    usual: float
    #: Share of the rows that may be beyond the usual distance: half precision rounds differently in batches of another
    #: shape.
    share: float
    #: No row may be farther.
    worst: float

    @classmethod
    def of(cls, usual: float, share: float = 0.25) -> Tolerance:
        """With the bound of the worst row that goes with it."""
        return cls(usual, share, _WORST * usual if share else usual)


TOLERANCES: Final = {
    torch.float32: Tolerance.of(1e-3, 0.0),
    torch.float16: Tolerance.of(2e-2),
    torch.bfloat16: Tolerance.of(8e-2),
}
#: Of weights that transformers has quantised, and of e4m3, whose activations have steps of 6 %: single rows of random
#: models differ by anything.
QUANTISED_TOLERANCE: Final = Tolerance(0.2, 0.25, worst=math.inf)
#: Of grouped weights, whose activations are rounded to 8 bits: numbers that differ in their last bit may be rounded to
#: different steps. Trained models differ by a hundredth, single rows of random ones by anything.
GROUPED_TOLERANCES: Final = {
    torch.float32: Tolerance(5e-2, 0.25, worst=math.inf),
    torch.bfloat16: Tolerance(0.1, 0.25, worst=math.inf),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """What one of the sequences is fed in a step."""

    owner: int
    segment: Segment
    #: The rows that belong to its text.
    kept: Kept
    #: The others follow them, and are rolled back.
    is_rejected: bool = False


class Reference:
    """Random token sequences and what the stock model answers to each of their tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape],
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        named_length: tuple[int, str] = (0, ""),
        mixers: Sequence[Mixer] = (),
    ) -> None:
        """Run the stock model (reference attention, one sequence at a time).

        The sequences are cut to fit ``num_blocks`` blocks together and ``max_model_len`` each. ``named_length`` is what
        :func:`~engine.loading.refusals.longest_named_length` found. With ``mixers`` the model has recurrent states: no
        tree is fed then, and rejected tokens in their place.

        Raises:
            ModelNotSupported: the stock model itself answers with NaN or infinity, keeps more than keys and values, or
                ``named_length`` is out of reach.
        """
        generator = torch.Generator().manual_seed(20)
        num_sequences = min(num_blocks, len(_CHUNKS))
        limit = min(num_blocks // num_sequences * block_size, max_model_len)
        self._vocab_size = vocab_size
        self._has_states = bool(mixers)
        self._drafted = drafted_tokens(model)
        self.sequences: list[list[int]] = []
        self.logits: list[torch.Tensor] = []
        for chunks in _CHUNKS[:num_sequences]:
            ids = torch.randint(vocab_size, (min(sum(map(abs, chunks)), limit),), generator=generator)
            with torch.inference_mode():
                logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0].float()
            if not bool((logits if self._drafted is None else logits[:, self._drafted]).isfinite().all()):
                raise ModelNotSupported(
                    f"{type(model).__name__} in {_name(model.dtype)} answers with NaN or infinity; try another dtype"
                )
            self.sequences.append(ids.tolist())
            self.logits.append(logits)
        self.tolerance = _tolerance_of(model)
        length, name = named_length
        entries = reach(shapes, length, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
        self._long: LongContext | LongText | None = None
        if mixers:
            entries = min(num_blocks * block_size, max_model_len)
            if entries >= SHORTEST:
                self._long = LongText(
                    model, border_of(model, shapes, mixers, length), room=entries, vocab_size=vocab_size
                )
                entries = self._long.length
        elif not is_adopted(model) and keeps_what_is_paged(model, shapes) and entries:
            self._long = LongContext(model, shapes, (entries, entries // 3), vocab_size=vocab_size)
        #: Entries of the longest text that is checked.
        self.longest = max(len(ids) for ids in self.sequences) if self._long is None else entries
        if self.longest < min(length, max_model_len - 1):
            raise ModelNotSupported(
                f"{type(model).__name__} may attend differently beyond {length} tokens ({name} in its config), and"
                f" texts of {self.longest} tokens can be checked here: set max_model_len to {length} or less"
            )

    def difference(self, engine: Engine) -> str | None:
        """Feed the sequences ragged, in chunks and trees, through an engine; None if it agrees, else what differs."""
        opened = [engine.pool.open(len(ids)) for ids in self.sequences]
        rows: list[list[torch.Tensor]] = [[] for _ in opened]
        in_trees: list[tuple[int, int]] = []  # sequence and position
        try:
            for step in zip_longest(*_CHUNKS[: len(opened)], fillvalue=0):
                parts = [
                    part
                    for owner, (sequence, count) in enumerate(zip(opened, step, strict=True))
                    if (part := self._part(owner, sequence, count)) is not None
                ]
                if not parts:
                    continue
                logits = engine.forward([part.segment for part in parts])
                engine.keep_rows([part.kept for part in parts if part.segment.parents])
                for part in parts:
                    answered, logits = logits[: part.segment.num_logits], logits[part.segment.num_logits :]
                    rows[part.owner].append(answered[list(part.kept.rows)])
                    if part.is_rejected or part.segment.parents:
                        in_trees += [(part.owner, part.kept.first + at) for at in range(len(PATH_ROWS))]
                    if part.is_rejected:
                        engine.pool.rollback(part.kept.sequence, part.kept.first + len(part.kept.rows))
        finally:
            for sequence in reversed(opened):
                engine.pool.release(sequence)
        answers = [torch.cat(part) for part in rows]
        found = disagreement(torch.cat(answers), torch.cat(self.logits), self.tolerance, self._drafted)
        if found is None and in_trees:
            tree_rows = [torch.stack([part[o][at] for o, at in in_trees]) for part in (answers, self.logits)]
            found = self._in_few_rows(*tree_rows, what="among rejected tokens")
        if found is None and isinstance(self._long, LongText):
            found = disagreement(*self._long.feed(engine), self.tolerance, self._drafted)
            return None if found is None else f"in a long text {found}"
        if found is None and self._long is not None:
            found = self._in_few_rows(*self._long.feed(engine), what="after a long text")
        return found

    def _in_few_rows(self, answers: torch.Tensor, wanted: torch.Tensor, *, what: str) -> str | None:
        """As :func:`disagreement`; of few rows most must be within the usual distance, where not all must."""
        tolerance = replace(self.tolerance, share=0.5) if self.tolerance.share else self.tolerance
        found = disagreement(answers, wanted.to(answers.device), tolerance, self._drafted)
        return None if found is None else f"{what} {found}"

    def _part(self, owner: int, sequence: KVSequence, count: int) -> _Part | None:
        """What a sequence is fed in one step; None at its end."""
        rest = self.sequences[owner][sequence.length :]
        chunk = rest[: abs(count)]
        if not chunk:
            return None
        if count != _TREE or len(rest) < len(TREE_PARENTS):
            return _Part(
                owner, Segment(sequence, chunk, len(chunk)), Kept(sequence, sequence.length, range(len(chunk)))
            )
        tree = tree_of(chunk, self._vocab_size)
        if self._has_states:
            segment = Segment(sequence, chunk + tree[::2], len(tree))
            return _Part(owner, segment, Kept(sequence, sequence.length, range(len(chunk))), is_rejected=True)
        segment = Segment(sequence, tree, len(tree), parents=TREE_PARENTS)
        return _Part(owner, segment, Kept(sequence, sequence.length, PATH_ROWS))


def reach(shapes: Sequence[LayerShape], length: int, *, num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Entries of the longer text of :class:`LongContext`: past every window, and past ``length``, as far as a text can
    be so long here; 0: there is no room for one.
    """
    windows = [shape.window for shape in shapes if shape.window is not None and shape.window < MAX_ENTRIES - 8]
    wanted = min(max(MIN_ENTRIES, length + 8, *(window + 8 for window in windows), 0), MAX_ENTRIES)
    room = min(num_blocks // 2 * block_size, max_model_len) - len(TREE_PARENTS)
    return max(0, min(wanted, room))


def _tolerance_of(model: PreTrainedModel) -> Tolerance:
    tolerance = TOLERANCES.get(model.dtype, QUANTISED_TOLERANCE)
    if any(
        isinstance(module, GroupedLinear) and module.grouped and module.grouped.rounds for module in model.modules()
    ):
        tolerance = GROUPED_TOLERANCES[model.dtype]
    elif getattr(model, "hf_quantizer", None) or any(isinstance(module, Float8Linear) for module in model.modules()):
        tolerance = QUANTISED_TOLERANCE
    if tolerance.share and has_experts(model):
        return replace(tolerance, worst=max(tolerance.worst, OTHER_EXPERT))
    return tolerance


def has_experts(model: PreTrainedModel) -> bool:
    """Whether a token's way through the model depends on a router, as its configuration has it."""
    fields = model.config.get_text_config(decoder=True).to_dict()
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in fields.items())


def disagreement(
    logits: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance, drafted: torch.Tensor | None = None
) -> str | None:
    """None where rows of logits [rows, V] agree with what the stock model answers, else what differs.

    The distance of a row is the root mean square, relative to the logits' spread. ``drafted`` int64 [Vd]: all others
    have -inf (:mod:`engine.trimmed_outputs`); None: no token has.
    """
    if drafted is not None:
        at = drafted.to(logits.device)
        if not logits.index_fill(1, at, -torch.inf).isneginf().all():
            return "tokens that are left out have logits"
        logits, wanted = logits[:, at], wanted[:, at]
    spread = (wanted - wanted.mean(-1, keepdim=True)).square().mean().sqrt()
    distance = (logits - wanted).square().mean(-1).sqrt() / spread.clamp_min(1e-12)  # [rows]
    for bound, share in ((tolerance.usual, tolerance.share), (tolerance.worst, 0.0)):
        beyond = ~(distance <= bound)  # NaN is beyond too
        if float(beyond.float().mean()) > share:
            return (
                f"{int(beyond.sum())} of {len(distance)} rows differ from the stock model by more than {bound:g}"
                f" of the logits' spread (at most {float(distance.max()):.3g})"
            )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

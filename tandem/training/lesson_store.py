"""Lessons on disk, in parts: written one after the other, read by mapping, so memory stays bounded.

A part depends on the settings and its number alone. So one that is there already need not be written again, and an
interrupted training continues with the very same lessons.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specdec.errors import InvalidRequest
from tandem.training.continuations import continue_rows, draw_prompts
from tandem.training.lesson import TOP, Lessons, write_lessons
from tandem.training.settings import TrainSettings

#: Rows of a part: as many as the target continues at a time.
PART_ROWS = 128


class LessonStore:
    """The folder of one training's lessons."""

    def __init__(
        self, folder: Path, settings: TrainSettings, layers: Sequence[int], prefix: Sequence[int] = ()
    ) -> None:
        """`layers`: states to keep; `prefix`: ids every row begins with, such as a beginning-of-text token."""
        self.folder = folder
        self.settings = settings
        self.layers = tuple(layers)
        self.prefix = torch.tensor(prefix, dtype=torch.int64)

    @property
    def num_parts(self) -> int:
        """Parts to train on; the held-out one is apart."""
        return -(-self.settings.num_rows // PART_ROWS)

    def fill(
        self,
        target: PreTrainedModel,
        texts: Sequence[torch.Tensor],
        held_out: Sequence[torch.Tensor],
        advance: Callable[[int], object],
    ) -> None:
        """Writes the parts that are missing; `advance` is told the rows of each.

        Raises:
            InvalidRequest: there is less text than a row or less room on the disk than the lessons need.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_room(target)
        for number in range(-1, self.num_parts):
            path = self._path(number)
            if not path.exists():
                rows = self._held_out_rows(target, held_out) if number < 0 else self._rows(target, texts, number)
                save_lessons(path, write_lessons(target, rows, self.layers, top=min(TOP, _vocab_size(target) - 1)))
            advance(0 if number < 0 else self._size(number))

    def parts(self) -> list[Lessons]:
        """All parts to train on, mapped from their files."""
        return [load_lessons(self._path(number)) for number in range(self.num_parts)]

    def held_out(self) -> Lessons:
        """Greedy continuations of held-out text."""
        return load_lessons(self._path(-1))

    def _path(self, number: int) -> Path:
        return self.folder / ("held-out.safetensors" if number < 0 else f"part-{number:05d}.safetensors")

    def _size(self, number: int) -> int:
        return min(PART_ROWS, self.settings.num_rows - number * PART_ROWS)

    def _rows(self, target: PreTrainedModel, texts: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        """Some rows of data alone; of the others, which the target writes, some are sampled and the rest greedy."""
        settings, size = self.settings, self._size(number)
        seed = settings.seed * 1_000_003 + number
        generator = torch.Generator().manual_seed(seed)
        num_data = round(size * settings.data_share)
        data = self._windows(texts, num_data, settings.row_length, generator, "data")
        prompts = self._windows(texts, size - num_data, settings.prompt_length, generator, "data")
        temperatures = torch.zeros(len(prompts))
        temperatures[len(prompts) - round(len(prompts) * settings.sampled_share) :] = settings.temperature
        written = self._continue(target, prompts, temperatures, seed)
        return torch.cat([data, written])

    def _held_out_rows(self, target: PreTrainedModel, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        count, length = self.settings.num_held_out_rows, self.settings.prompt_length
        prompts = self._windows(texts, count, length, generator, "held_out")
        return self._continue(target, prompts, torch.zeros(count), 0)

    def _windows(
        self, texts: Sequence[torch.Tensor], count: int, length: int, generator: torch.Generator, param: str
    ) -> torch.Tensor:
        """Windows of the texts behind the prefix: int64 [count, length]."""
        wanted, found = length - len(self.prefix), sum(map(len, texts))
        if found <= wanted or wanted <= 0:
            raise InvalidRequest(
                f"the {'data to train on' if param == 'data' else 'held-out data'} has {found} tokens,"
                f" too few for rows with {wanted} of them; give more files, or shorter rows",
                param=param,
            )
        windows = draw_prompts(texts, count, wanted, generator)
        return torch.cat([self.prefix.expand(count, -1), windows], 1)

    def _continue(
        self, target: PreTrainedModel, prompts: torch.Tensor, temperatures: torch.Tensor, seed: int
    ) -> torch.Tensor:
        if not len(prompts):
            return prompts.new_empty(0, self.settings.row_length)
        generator = torch.Generator(target.device).manual_seed(seed)
        num_tokens = self.settings.row_length - self.settings.prompt_length
        device = target.device
        return continue_rows(target, prompts.to(device), num_tokens, temperatures.to(device), generator).cpu()

    def _check_room(self, target: PreTrainedModel) -> None:
        num_features = len(self.layers) * target.config.get_text_config().hidden_size
        missing = max(0, self.settings.num_rows - PART_ROWS * len(list(self.folder.glob("part-*.safetensors"))))
        needed = missing * self.settings.row_length * (4 + 6 * TOP + 2 * num_features)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise InvalidRequest(
                f"the lessons of {missing} rows need {needed / 1e9:.1f} GB, and {self.folder} has {free / 1e9:.1f} GB;"
                " lower num_rows or row_length",
                param="num_rows",
            )


def save_lessons(path: Path, lessons: Lessons) -> None:
    """Writes a part in one piece."""
    fresh = path.with_suffix(".new")
    save_file({field.name: getattr(lessons, field.name).contiguous() for field in fields(lessons)}, fresh)
    os.replace(fresh, path)


def load_lessons(path: Path) -> Lessons:
    """Maps a part; pages are read when they are used and can be dropped again."""
    with safe_open(path, framework="pt") as file:
        return Lessons(**{field.name: file.get_tensor(field.name) for field in fields(Lessons)})


def lesson_batches(parts: Sequence[Lessons], batch_tokens: int, seed: int) -> Iterator[tuple[Lessons, torch.Tensor]]:
    """Endless batches of about `batch_tokens`: rows (int64 index) of one part each; an epoch visits every row.

    Rows that do not fill a part's last batch wait for the next epoch, but a part smaller than a batch is one.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        batches: list[tuple[Lessons, torch.Tensor]] = []
        for part in parts:
            num_rows = min(len(part), max(1, batch_tokens // part.rows.shape[1]))
            order = torch.randperm(len(part), generator=generator)
            batches += [(part, index) for index in torch.split(order, num_rows) if len(index) == num_rows]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]


def _vocab_size(target: PreTrainedModel) -> int:
    return int(target.config.get_text_config().vocab_size)

"""Prompts of the benchmark: held out, exact, never twice."""

from pathlib import Path

import pytest

import training
from specdec.errors import InvalidRequest
from tandem.bench.prompts import HELD_OUT, pick_prompts


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_all_files_are_held_out_of_training() -> None:
    held_out = (Path(training.__file__).parent / "held_out.txt").read_text().split()
    assert set(HELD_OUT) <= set(held_out)


def test_prompts_differ_and_have_the_wanted_length() -> None:
    prompts = pick_prompts(encode, 100, 200)
    assert len(set(prompts)) == 100
    assert {len(prompt) for prompt in prompts} == {200}
    assert prompts == pick_prompts(encode, 100, 200)
    assert prompts != pick_prompts(encode, 100, 200, seed=1)


def test_asking_for_too_many() -> None:
    with pytest.raises(InvalidRequest, match="100000 prompts"):
        pick_prompts(encode, 100_000, 10)

"""Prompts of the benchmark: held out, exact, never twice."""

from pathlib import Path

import pytest

import tandem.training
from specdec.errors import InvalidRequest
from tandem.bench.prompts import HELD_OUT, pick_prompts, pick_texts, read_prompts


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_all_files_are_held_out_of_training() -> None:
    held_out = (Path(tandem.training.__file__).parent / "held_out.txt").read_text().split()
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


def test_texts_have_the_wanted_length() -> None:
    texts = pick_texts(20, 150)
    assert len(set(texts)) == 20
    assert {len(text) for text in texts} == {150}


def test_own_prompts_by_line_and_as_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("first\n\n  second {\n")
    assert read_prompts(str(file)) == ["first", "  second {"]
    file.write_text('{"prompt": "a\\nb", "id": 1}\n\n{"prompt": "c"}\n')
    assert read_prompts(str(file)) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n", "holds no prompt"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2"),
        ('{"prompt": "a"}\nnot json\n', "line 2"),
        ('{"prompt": ""}\n', "line 1"),
        (None, "cannot be read"),
    ],
)
def test_mistakes_in_own_prompts_are_named(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(str(file))

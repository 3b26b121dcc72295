"""``config.json``: one reader, one text for each error."""

import pytest

from engine.checkpoint_files import CheckpointFiles
from specdec.checkpoint_config import read_config, read_text_config
from specdec.errors import InvalidRequest

BROKEN = {
    "missing": (None, "has no config.json; give the folder of a checkpoint in Hugging Face format"),
    "no JSON": ("{", "config.json cannot be read: Expecting property name"),
    "deep": ("[" * 100_000, "config.json cannot be read: maximum recursion depth"),
    "no UTF-8": (b"\xff", "config.json cannot be read: 'utf-8' codec"),
    "no object": ("[]", "config.json is no JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_reader_says_the_same(tmp_path, name):
    text, words = BROKEN[name]
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    said = []
    for read in (read_config, read_text_config, lambda folder: CheckpointFiles(folder).config):
        with pytest.raises(InvalidRequest) as caught:
            read(tmp_path)
        said.append(str(caught.value))
    assert len(set(said)) == 1
    assert words in said[0]


def test_the_language_model_of_a_larger_one(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "dtype": "float32", "text_config": {"vocab_size": 2}}')
    assert read_config(tmp_path)["vocab_size"] == 1
    assert read_text_config(tmp_path) | {"text_config": None} == {
        "vocab_size": 2,
        "dtype": "float32",
        "text_config": None,
    }

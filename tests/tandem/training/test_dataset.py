import json
from pathlib import Path

import pytest

from specdec.errors import InvalidRequest
from tandem.training import dataset
from tandem.training.corpus import load_documents
from tandem.training.dataset import load_texts, read_file
from tandem.training.tokenizer import load_tokenizer

MODELS = Path(__file__).parents[3] / "tandem" / "models"
TOKENIZER = load_tokenizer(MODELS / "python-12m")


def read(path: Path) -> list[str]:
    return [document.text for document in read_file(str(path), TOKENIZER)]


def test_files_of_every_kind_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain\n")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": turns}, {"messages": messages}]))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.py").write_text("x = 1\n")
    (tmp_path / "sub" / "empty.py").write_text("\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "e.txt").write_text("no data")
    chat = "<|user|>\nHi\n<|assistant|>\nHello<|endoftext|>"
    assert read(tmp_path) == ["plain\n", "one", "two", chat, chat, "x = 1\n"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"caf\xe9", "no UTF-8 text"),
        ("a.jsonl", b'{"text": "one"}\n{', "no JSON"),
        ("a.jsonl", b'{"prompt": "one"}\n', 'entry 1 has neither "text" nor "messages"'),
        ("a.json", b'[{"messages": [{"value": "?"}]}]', "entry 1 cannot be rendered"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=text):
        read(tmp_path / name)


def test_held_out_text_is_never_trained_on(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"number {i}\n")
    texts = load_texts(TOKENIZER, [str(tmp_path)], [])
    assert (len(texts.training), len(texts.held_out)) == (38, 2)
    decoded = {TOKENIZER.decode(text) for text in texts.training}
    assert decoded.isdisjoint(TOKENIZER.decode(text) for text in texts.held_out)
    assert all(text[-1] == TOKENIZER.eos_token_id for text in texts.training + texts.held_out)

    few = load_texts(TOKENIZER, [str(tmp_path / f"{i}.txt") for i in range(3)], [])
    assert [len(text) + len(rest) for text, rest in zip(few.training, few.held_out, strict=True)] == [
        len(text)
        for text in load_texts(TOKENIZER, [str(tmp_path / f"{i}.txt") for i in range(3)], [str(tmp_path)]).training
    ]
    assert all(len(rest) > 0 for rest in few.held_out)
    named = load_texts(TOKENIZER, [str(tmp_path / "1.txt")], [str(tmp_path / "2.txt")])
    assert TOKENIZER.decode(named.held_out[0]).startswith("number 2")
    with pytest.raises(InvalidRequest, match="held_out nowhere does not exist"):
        load_texts(TOKENIZER, [str(tmp_path)], ["nowhere"])


def test_the_bundled_target_has_data_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, held_out = load_documents()
    assert len(documents) > 500
    assert len(held_out) > 20
    # Some of them: reading them all takes seconds.
    monkeypatch.setattr(dataset, "load_documents", lambda: (documents[:5], held_out[:3]))
    texts = load_texts(TOKENIZER, [], [])
    assert len(texts.training) >= 5
    assert [TOKENIZER.decode(text[:-1]) for text in texts.held_out] == [document.text for document in held_out[:3]]

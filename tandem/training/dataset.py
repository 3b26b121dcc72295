"""The data of `tandem train`: texts from files, cut into those trained on and those held out."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.errors import InvalidRequest
from tandem.training.chat import SPECIAL_TOKENS
from tandem.training.corpus import Document, load_documents
from tandem.training.tokenizer import encode_documents

#: One document in this many is held out where no held-out files are named.
HELD_OUT_EVERY = 20
_TABLES = (".json", ".jsonl")
#: Speakers as ShareGPT's files name them.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Texts:
    """Ids of each text, int64 [num_tokens]: those trained on, and those held out."""

    training: list[torch.Tensor]
    held_out: list[torch.Tensor]


def load_texts(tokenizer: PreTrainedTokenizerBase, data: Sequence[str], held_out: Sequence[str]) -> Texts:
    """Texts of the named files and folders; of the standard library, as the bundled pair's, where none is named.

    Without held-out files a twentieth of the documents is held out, chosen by a hash of their names; with fewer
    than 20 documents, the last tenth of each.

    Raises:
        InvalidRequest: a file does not exist, or cannot be read as what its name says.
    """
    if not data:
        if not set(SPECIAL_TOKENS) <= tokenizer.get_vocab().keys():
            raise InvalidRequest(
                "data is needed: name the files to train on (only the bundled pair has its own)", param="data"
            )
        documents, others = load_documents()
        encoded = encode_documents(tokenizer, documents, with_chat=True)  # type: ignore[arg-type]
        return Texts(encoded, encode_documents(tokenizer, others, with_chat=False))  # type: ignore[arg-type]
    documents = [document for name in data for document in read_file(name, tokenizer)]
    others = [document for name in held_out for document in read_file(name, tokenizer, "held_out")]
    if not others and len(documents) >= HELD_OUT_EVERY:
        ranked = sorted(documents, key=lambda document: hashlib.sha256(document.path.encode()).digest())
        size = len(documents) // HELD_OUT_EVERY
        others, documents = ranked[:size], ranked[size:]
    training = encode_texts(tokenizer, documents)
    if others:
        return Texts(training, encode_texts(tokenizer, others))
    cuts = [len(text) * 9 // 10 for text in training]
    pairs = list(zip(training, cuts, strict=True))
    return Texts([text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs])


def encode_texts(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[torch.Tensor]:
    """Ids of each document, the tokenizer's end token last where it has one."""
    if not documents:
        return []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer([document.text for document in documents], add_special_tokens=False, verbose=False)
    return [torch.tensor([*ids, *end]) for ids in encoded.input_ids]


def read_file(name: str, tokenizer: PreTrainedTokenizerBase, param: str = "data") -> Iterator[Document]:
    """Documents of a file, or of all files below a folder.

    A `.jsonl` file holds an object a line, a `.json` file a list of them, each with `text`, or with `messages` (or
    ShareGPT's `conversations`), which the chat template renders. Any other file is one document, as it is.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file.relative_to(path))]
    elif path.is_file():
        files = [path]
    else:
        raise InvalidRequest(f"{param} {name} does not exist", param=param)
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix not in _TABLES:
                yield from [Document(str(file), text)] if text.strip() else []
                continue
            lines = [line for line in text.splitlines() if line.strip()]
            entries = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in lines]
        except ValueError as error:
            kind = "JSON" if isinstance(error, json.JSONDecodeError) else "UTF-8 text"
            raise InvalidRequest(f"{param} {file} is no {kind}: {error}", param=param) from None
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], start=1):
            yield Document(f"{file}:{number}", _text_of(entry, tokenizer, f"{param} {file}, entry {number}"))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text_of(entry: Any, tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return str(entry["text"])
    turns = (entry.get("messages") or entry.get("conversations")) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise InvalidRequest(f'{place} has neither "text" nor "messages"', param="data")
    try:
        messages = [
            {
                "role": _ROLES.get(role := turn.get("role") or turn["from"], role),
                "content": turn.get("content") or turn.get("value") or "",
            }
            for turn in turns
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise what they like
        raise InvalidRequest(f"{place} cannot be rendered by the chat template: {error}", param="data") from None

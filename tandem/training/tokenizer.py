"""The byte-level BPE tokenizer of the pair, and texts packed into rows of its ids."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.training.chat import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, cut_exchanges
from tandem.training.corpus import Document, load_documents

VOCAB_SIZE = 4096
MAX_LENGTH = 2048


def train_tokenizer(documents: Sequence[Document], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Learns `vocab_size` tokens (special ones and all 256 bytes included) from `documents`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, readable by transformers 4 and 5."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer saved in `folder`."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document], *, with_chat: bool
) -> list[torch.Tensor]:
    """Ids of each file (int64 [num_tokens]), `<|endoftext|>` last.

    With `with_chat` the exchanges cut from a file follow as a text of their own.
    """
    texts = [d.text + END_OF_TEXT for d in documents]
    if with_chat:
        texts += [text for d in documents if (text := "".join(cut_exchanges(d)))]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [torch.tensor(encoding.ids) for encoding in encoded]


def pack_rows(texts: Sequence[torch.Tensor], length: int, generator: torch.Generator) -> torch.Tensor:
    """Joins `texts` in random order and cuts the stream into rows: int64 [num_rows, length].

    Rows come in random order; what does not fill a last row is dropped.
    """
    order = torch.randperm(len(texts), generator=generator).tolist()
    stream = torch.cat([texts[i] for i in order])
    # A random offset moves the cuts, so that epochs do not repeat the same rows.
    offset = int(torch.randint(length, (), generator=generator))
    num_rows = (len(stream) - offset) // length
    rows = stream[offset : offset + num_rows * length].view(num_rows, length)
    return rows[torch.randperm(num_rows, generator=generator)]


def main() -> None:
    """Trains the tokenizer on the training files and saves it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/training/tokenizer"))
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    arguments = parser.parse_args()
    documents, held_out = load_documents()
    tokenizer = train_tokenizer(documents, arguments.vocab_size)
    save_tokenizer(tokenizer, arguments.out)
    for name, part in (("training", documents), ("held out", held_out)):
        num_tokens = sum(map(len, encode_documents(tokenizer, part, with_chat=False)))
        num_bytes = sum(len(d.text.encode()) for d in part)
        print(f"{name}: {num_tokens} tokens, {num_bytes / num_tokens:.2f} bytes a token")


if __name__ == "__main__":
    main()

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from tandem.training.chat import render_exchange
from tandem.training.tokenizer import VOCAB_SIZE, load_tokenizer, pack_rows

MODELS = Path(__file__).parents[3] / "tandem" / "models"
TOKENIZER = load_tokenizer(MODELS / "python-12m")


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_every_byte_is_a_token() -> None:
    assert len(TOKENIZER) == VOCAB_SIZE
    assert set(ByteLevel.alphabet()) <= TOKENIZER.get_vocab().keys()
    text = "naïve 日本語 🐍\t\r\n\x00\x7f"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("name", ["python-12m", "python-1m"])
def test_both_folders_hold_the_same_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.model_max_length == 2048
    # No token is added that the text does not hold: prompts stay prefixes of each other.
    assert tokenizer("x = 1").input_ids == tokenizer("x = 1", add_special_tokens=False).input_ids


def test_the_template_renders_what_training_rendered() -> None:
    messages = [{"role": "user", "content": "Return one."}, {"role": "assistant", "content": "def f(): return 1\n"}]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert rendered == render_exchange("Return one.", "def f(): return 1\n")
    prompt = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)
    assert len(TOKENIZER.encode("<|user|><|assistant|><|endoftext|>")) == 3


def test_rows_are_cut_from_every_text_without_overlap() -> None:
    texts = [torch.arange(0, 40), torch.arange(40, 100)]
    rows = pack_rows(texts, 7, torch.Generator().manual_seed(1))
    assert rows.shape[1] == 7
    assert len(rows) in (13, 14)
    assert len(rows.flatten().unique()) == rows.numel()
    again = pack_rows(texts, 7, torch.Generator().manual_seed(1))
    assert torch.equal(rows, again)

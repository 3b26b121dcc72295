"""Grammars of the bundled target's tokenizer."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tandem
from specdec.settings.model import ModelSettings
from specdec.types import ModelInfo
from target_service.grammar.compiler import GrammarCompiler
from target_service.grammar.tokenizer import read_tokenizer

MODEL = Path(tandem.__file__).parent / "models" / "python-12m"
INFO = ModelInfo(name="python-12m", vocab_size=4096, max_model_len=2048, tokenizer_size=4096, eos_token_ids=(0,))


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="session")
def make_compiler():
    """Makes compilers that are closed in the end."""
    made = []

    def make():
        made.append(GrammarCompiler(partial(read_tokenizer, ModelSettings(model=str(MODEL)), INFO)))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


@pytest.fixture(scope="session")
def compiler(make_compiler):
    """One for all tests."""
    return make_compiler()


@pytest.fixture(scope="session")
def compile_grammar(compiler):
    """A grammar that has read a text's tokens."""
    return lambda params, output=(): asyncio.run(compiler.compile(params, output))

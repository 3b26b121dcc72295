"""Grammars of the bundled target's tokenizer."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tandem
from specdec.settings.model import ModelSettings
from target_service.grammar.compiler import GrammarCompiler
from target_service.grammar.tokenizer import read_tokenizer

MODEL = Path(tandem.__file__).parent / "models" / "python-12m"
EOS = 0


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="session")
def compiler():
    return GrammarCompiler(lambda: read_tokenizer(ModelSettings(model=str(MODEL)), (EOS,)))


@pytest.fixture(scope="session")
def compile_grammar(compiler):
    """A grammar that has read a text's tokens."""
    return lambda params, output=(): asyncio.run(compiler.compile(params, output))

"""A tiny target that knows its few documents by heart, and the files it learned them from."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.training.checkpoint import round_weights, save_model
from tandem.training.corpus import Document
from tandem.training.optimizer import OptimizerSettings
from tandem.training.pretrain import PretrainSettings, pretrain
from tandem.training.schedule import ScheduleSettings
from tandem.training.shape import ModelShape
from tandem.training.tokenizer import encode_documents, train_tokenizer

SHAPE = ModelShape(
    hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=320, max_length=256
)
VERBS = ("open", "close", "read", "write", "flush", "seek", "scan", "join")


def documents() -> list[Document]:
    return [
        Document(
            f"{verb}.py",
            "".join(
                f"def {verb}_{noun}(path):\n    return {other}_{noun}(path)\n\n"
                for noun in ("file", "line", "word", "page", "book")
                for other in VERBS[i:] + VERBS[:i]
            ),
        )
        for i, verb in enumerate(VERBS)
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for document in documents():
        (folder / document.path).write_text(document.text)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the target, some hundred steps after its start."""
    tokenizer = train_tokenizer(documents(), SHAPE.vocab_size)
    settings = PretrainSettings(
        schedule=ScheduleSettings(num_steps=80, warmup_steps=10),
        optimizer=OptimizerSettings(matrix_rate=1e-2, other_rate=1e-2),
        batch_tokens=1024,
        row_length=64,
        long_row_length=64,
        compiled=False,
        bfloat16=False,  # slow on many CPUs
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(SHAPE.config())
    pretrain(model, encode_documents(tokenizer, documents(), with_chat=False), settings)
    torch.set_num_threads(threads)
    round_weights(model)
    folder = tmp_path_factory.mktemp("target") / "tiny"
    save_model(model, tokenizer, folder)
    return folder

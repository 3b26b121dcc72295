"""A setting that a head's config says wrongly is found on the first text and named.

The heads are random. A text is made of the tokens that the head drafts with its right settings.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters.heads import misread
from draft_service.drafters.heads.base import LoadedHead, load_head
from draft_service.drafters.heads.misread import FirstText, GreedyDrafts
from engine.device_thread import DeviceThread
from engine.heads.dflash import DFlashConfig, DFlashHead, Reach
from engine.heads.files.checkpoint import read_head
from engine.heads.head import DraftHead
from engine.heads.mtp import MtpHead
from engine.native.linears import NativeLinear
from engine.native.rounded import Int8Linear
from specdec.params import SamplingParams
from specdec.settings import DraftSettings, ModelSettings, SpeculativeSettings
from specdec.types import HiddenStates, ModelInfo, SessionSpec
from tests.engine.heads.mtp_targets import write_mtp_target
from tests.engine.heads.random_heads import VOCAB, eagle3, layer_config, shaken

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 48


def dflash(**changes: Any) -> DFlashHead:
    options: dict[str, Any] = {
        "layer": layer_config(),
        "reaches": (Reach(), Reach()),
        "target_hidden_size": 24,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_state_layers": (1, 2),
        "block_size": 4,
        "mask_token_id": VOCAB - 2,
        "owns_embeddings": True,
        "owns_lm_head": True,
    }
    return shaken(DFlashHead(DFlashConfig(**options | changes)))


def mtp(folder: Path) -> DraftHead:
    write_mtp_target(folder, "mimo")
    return read_head(folder, folder, method="mtp")


def foreseen_text(head: DraftHead) -> FirstText:
    """A text that the head foresees, and random states."""
    model = ModelSettings(model="head", device="cpu")
    info = ModelInfo(name="head", architecture="", vocab_size=VOCAB, max_model_len=512, method=head.method)
    text = FirstText(LoadedHead(head, torch.device("cpu"), model, info, lambda: head, bytes))
    width = int(head.num_features)  # type: ignore[arg-type]
    features = torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(3))
    text.states = [HiddenStates(0, width, "float32", features.numpy().tobytes())]
    text.token_ids = [5, 6]
    drafts = GreedyDrafts(head, model)
    with torch.inference_mode():
        while len(text.token_ids) <= LENGTH:
            text.token_ids += drafts.after(text.token_ids, features)
    return text


CAUSAL = (Reach(is_causal=True),) * 2
CASES: dict[str, tuple[Callable[[Path], DraftHead], dict[str, Any], str]] = {
    "eagle3: residual": (lambda _: eagle3(), {"norm_before_residual": True}, "norm: norm_before_residual is True"),
    "eagle3: output": (lambda _: eagle3(norm_output=True), {"norm_output": False}, "norm: norm_output is False"),
    "mtp: order": (mtp, {"hidden_first": False}, "the embedding first"),
    "dflash: mask": (lambda _: dflash(), {"mask_token_id": 7}, f"mask_token_id is 7, not {VOCAB - 2}"),
    "dflash: causality": (lambda _: dflash(predicts_next=True), {"reaches": CAUSAL}, "the rows of a block are causal"),
    "dflash: layout": (lambda _: dflash(), {"predicts_next": True}, "sample_from_anchor is True"),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_setting_that_is_wrong_is_named(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, wrong, words = CASES[case]
    head = make(tmp_path)
    text = foreseen_text(head)

    thread = DeviceThread()

    async def explained() -> str:
        caplog.clear()
        await copy(text).explain(thread)
        return caplog.text

    assert "SELF-TEST" not in await explained()
    for name, value in wrong.items():
        if hasattr(getattr(head, "midlayer", None), name):
            setattr(head.midlayer, name, value)
        head.config = replace(head.config, **{name: value})
    assert words in await explained()
    assert all(getattr(head.config, name) == value for name, value in wrong.items()), "what was tried is undone"


async def test_a_service_that_closes_ends_the_trials(caplog: pytest.LogCaptureFixture) -> None:
    head = eagle3()
    text, thread = foreseen_text(head), DeviceThread()
    thread.close()
    await text.explain(thread)
    assert not caplog.text


def test_the_first_greedy_text_with_few_accepted_tokens_is_looked_into() -> None:
    text, (one, other) = foreseen_text(dflash()), (object(), object())
    spec = SessionSpec(session_id="s", token_ids=(1, 2), prompt_len=2, params=SamplingParams(temperature=0.0))

    def run(num_accepted: int, num_rounds: int = 10) -> bool:
        text.open(one, spec, 0)
        text.open(other, spec, 0)
        for number in range(num_rounds):
            text.draft(one, (7, 7, 7))
            text.draft(other, (8, 8, 8))
            text.commit(one, 2 + number * (num_accepted + 1), (7,) * num_accepted + (9,), ())
            text.commit(other, 2, (8,), ())
        assert not text.close(other)
        return text.close(one)

    text.open(one, replace(spec, params=SamplingParams(temperature=1.0)), 0)
    assert not text.close(one), "sampled texts say less"
    assert not run(0, misread.MIN_ROUNDS - 1), "too short; another one is waited for"
    assert run(0)
    assert not run(0), "once is enough"
    text.is_over = False
    assert not run(3)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_head_is_read_again_as_it_serves(tmp_path: Path, quantization: str | None) -> None:
    """With the tokens it may draft alone, and with rounded weights; packed, so that measuring is quick."""
    write_mtp_target(tmp_path, "mimo")
    (tmp_path / "ids.json").write_text(str(list(range(0, VOCAB, 2))))
    options = {"method": "mtp", "model": str(tmp_path), "draft_vocab": str(tmp_path / "ids.json")}
    model = ModelSettings(model=str(tmp_path), device="cpu", num_threads=1, quantization=quantization)
    settings = DraftSettings(speculative=SpeculativeSettings(**options), model=model, target_model=str(tmp_path))
    loaded = load_head(settings)
    again = loaded.read()
    assert isinstance(loaded.head, MtpHead)
    assert isinstance(again, MtpHead)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        served = loaded.head.to_target_logits(loaded.head.logits(x))
        measured = again.to_target_logits(again.logits(x))
    assert measured.isneginf().sum() == 5 * (VOCAB // 2)
    assert isinstance(loaded.head.layers[0].eh_proj, Int8Linear) == (quantization == "int8")
    assert isinstance(again.layers[0].eh_proj, NativeLinear)
    torch.testing.assert_close(measured, served, atol=1e-1, rtol=1e-1)

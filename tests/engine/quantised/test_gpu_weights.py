"""Quantised checkpoints as a GPU gets them; a CPU has the same product, with another packing."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.checkpoint_files import CheckpointFiles
from engine.cuda import int4
from engine.cuda.int4 import Int4Linear
from engine.grouped_weight import GroupedWeight, round_to_4_bits, round_to_8_bits
from engine.loading import checkpoint, gpu_weights, load
from engine.loading.assembly import PackedSource, assemble
from engine.native.rounded import GroupedLinear
from specdec.errors import ModelNotSupported
from specdec.settings import ModelSettings
from tests.engine.quantised.test_checkpoints import _FORMATS, _write

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def weight(*, offsets: bool = False, first: int = -8, order: bool = False) -> GroupedWeight:
    g = torch.Generator().manual_seed(1)
    codes, scales = torch.randint(16, (48, 256), generator=g), torch.rand(48, 4, generator=g) / 9
    return GroupedWeight.of_codes(
        codes.to(torch.uint8),
        scales,
        64,
        offsets=torch.rand(48, 4, generator=g) if offsets else None,
        table=torch.arange(first, first + 16),
        order=torch.randperm(256, generator=g) if order else None,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"offsets": True, "first": 0}, {"first": -5}, {"order": True}],
    ids=" ".join,
)
def test_a_layer_multiplies_by_the_weight_it_stands_for(options: dict[str, Any]) -> None:
    own, bias = weight(**options), torch.randn(48)
    assert int4.unknown(own) is None
    x = torch.randn(3, 5, 256).bfloat16()
    wanted = nn.functional.linear(x.float(), own.decode(), bias)
    found = Int4Linear.of(own, bias, DEVICE)(x.to(DEVICE)).float().cpu()
    torch.testing.assert_close(found, wanted, atol=3e-2 * float(wanted.abs().max()), rtol=0)


def test_what_the_product_does_not_know() -> None:
    plain = torch.randn(48, 256)
    assert int4.unknown(round_to_8_bits(plain)) == "codes of 8 bits"
    assert int4.unknown(round_to_4_bits(plain)) == "codes that are no whole numbers"
    odd = GroupedWeight.of_codes(torch.zeros(40, 96, dtype=torch.uint8), torch.ones(40, 2), 48, table=torch.arange(16))
    assert int4.unknown(odd) == "40 x 96 weights in groups of 48"


def placed(settings: ModelSettings, dtype: torch.dtype) -> Any:
    config = checkpoint.load_config(settings)
    files = CheckpointFiles(settings.model)
    stored = files.stored_format
    assert stored is not None
    with ExitStack() as stack:
        source = PackedSource(files, stored, stack)
        model, names = assemble(source, config, dtype, settings.model, rounds_rest=False)
    assert not checkpoint.unused_tensors(names, model)
    gpu_weights.place(model, dtype, DEVICE, "some")
    return model.to(DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["w4a16", "w4a16 asymmetric", "gptq act-order", "w8a8", "nvfp4"])
def test_a_checkpoint_answers_as_the_weights_it_stands_for(
    form: str, tmp_path: Path, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    num_int4 = 0 if form in {"w8a8", "nvfp4"} else 14
    model = tools.build("llama", **SIZES, attention_bias=True)
    settings = _write(model, tmp_path, *_FORMATS[form]())
    made = placed(settings, torch.bfloat16)
    kinds = [type(module) for module in made.modules()]
    assert (kinds.count(Int4Linear), kinds.count(GroupedLinear)) == (num_int4, 0)
    assert ("14 layers are decoded to torch.bfloat16: 14 for codes" in caplog.text) is (num_int4 == 0)
    assert made.get_memory_footprint() > sum(
        module.packed.nbytes for module in made.modules() if type(module) is Int4Linear
    )
    monkeypatch.setattr(checkpoint, "load_model", lambda *_, **__: made)
    engine = load.load_engine(replace(settings, device=str(DEVICE), kv_cache_memory_bytes=1 << 24))
    assert engine.info.num_parameters == model.num_parameters()
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    found = tools.feed(engine, engine.pool.open(20), ids).float().cpu()
    assert float((found - wanted).square().mean().sqrt() / wanted.std()) < 0.1  # bfloat16; with wrong scales it is 1


def test_in_float32_all_are_decoded(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", **SIZES)
    made = placed(_write(model, tmp_path, *_FORMATS["gptq"]()), torch.float32)
    ids = torch.tensor([tools.random_ids(20, seed=3)], device=DEVICE)
    torch.testing.assert_close(
        made(ids).logits[0].cpu(), tools.stock_logits(model, ids[0].tolist()), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("fault", "text"), [("wrong", "off by"), ("missing", "no such operator")])
def test_a_product_that_is_wrong_or_missing_is_not_used(
    fault: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(layer: Int4Linear, x: torch.Tensor) -> torch.Tensor:
        if fault == "missing":
            raise NotImplementedError("no such operator")
        return x.new_ones(len(x), layer.out_features)

    monkeypatch.setattr(Int4Linear, "forward", forward)
    model = nn.Sequential(*(GroupedLinear(weight(), torch.bfloat16, None) for _ in range(2)))
    gpu_weights.place(model, torch.bfloat16, DEVICE, "some")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert "some: 2 layers are decoded" in caplog.text
    assert text in caplog.text


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        ModelNotSupported, match=r"some holds quantised weights, .* this one has 7\.5: set device to cpu"
    ):
        gpu_weights.place(nn.Sequential(), torch.bfloat16, torch.device("cuda"), "some")

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
from engine.cuda import float8 as float8_product
from engine.cuda import int4
from engine.cuda.float8 import Float8Linear, round_rows
from engine.cuda.int4 import Int4Linear
from engine.grouped_weight import GroupedWeight, round_to_4_bits, round_to_8_bits
from engine.loading import checkpoint, gpu_weights, load
from engine.loading.assembly import PackedSource, assemble
from engine.native.rounded import GroupedLinear
from specdec.errors import ModelNotSupported
from specdec.settings import ModelSettings
from tests.engine.quantised.formats import FORMATS, compressed_fp8, fp8, write

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
FORMATS = {**FORMATS, "fp8": lambda: fp8(128), "fp8 w8a8": compressed_fp8}
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


def float8(kind: str, outputs: int = 48, inputs: int = 256, seed: int = 1) -> GroupedWeight:
    """e4m3 with a scale of all, per output or per block of 64 x 128, as the readers give them."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randn(outputs, inputs, generator=g).mul(90).to(torch.float8_e4m3fn)
    if kind == "block":
        scales = torch.rand(-(-outputs // 64), inputs // 128, generator=g) / 100
        return GroupedWeight.of_codes(codes, scales.repeat_interleave(64, 0)[:outputs], 128)
    scales = torch.rand(1 if kind == "tensor" else outputs, 1, generator=g) / 100
    return GroupedWeight.of_codes(codes, scales.expand(outputs, 1), inputs)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    wanted_dtype: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """What a GPU computes: a CPU has no product with scales per block. Layouts are those that a GPU asks for."""
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert not any(size % 16 for size in (a.shape[1], *b.shape))
    rows, groups = scale_a.shape
    assert scale_b.shape == (groups, b.shape[1])
    if groups > 1:
        assert (scale_a.stride(), scale_b.stride()) == ((1, rows), (b.shape[1], 1))
        assert rows % 4 == 0
    size = a.shape[1] // groups
    wide = (a.float() * scale_a.repeat_interleave(size, 1)) @ (b.float() * scale_b.repeat_interleave(size, 0))
    return (wide if options["bias"] is None else wide + options["bias"]).to(wanted_dtype or options["out_dtype"])


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of scales on a CPU."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


@pytest.mark.parametrize("kind", ["tensor", "output", "block"])
@pytest.mark.parametrize("is_own", [False, True])
def test_e4m3_is_multiplied_by_rows_that_are_rounded_alone(kind: str, is_own: bool, request: Any) -> None:
    if kind == "block" or not is_own:
        request.getfixturevalue("blocks")
    g = torch.Generator().manual_seed(2)
    own, bias = float8(kind), torch.randn(48, generator=g)
    assert float8_product.unknown(own) is None
    layer = Float8Linear.of(own, bias, DEVICE)
    x = torch.randn(3, 5, 256, generator=g).bfloat16()
    wanted = nn.functional.linear(x.float(), own.decode(), bias)
    found = layer(x.to(DEVICE)).float().cpu()
    torch.testing.assert_close(found, wanted, atol=4e-2 * float(wanted.abs().max()), rtol=0)
    rounded = round_rows(x.view(15, 256), layer.group)
    assert (rounded.codes.float().abs().view(15, -1, layer.group).amax(2) == 448).all()
    alone = round_rows(x[1, 2:3], layer.group)
    assert torch.equal(alone.codes.float()[0], rounded.codes.float()[7])
    assert torch.equal(alone.scales[0], rounded.scales[7])


@pytest.mark.parametrize(
    ("kind", "num_inputs", "group"), [("output", 256, 128), ("tensor", 256, 128), ("output", 48, 48)]
)
def test_on_hopper_each_block_has_the_scale_of_its_output(
    kind: str, num_inputs: int, group: int, blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are rounded in blocks then, which is no coarser."""
    monkeypatch.setattr(float8_product, "capability_of", lambda device: (9, 0))
    own = (
        float8(kind, 48)
        if num_inputs == 256
        else GroupedWeight.of_codes(torch.randn(48, 48).to(torch.float8_e4m3fn), torch.rand(48, 1), 48)
    )
    layer = Float8Linear.of(own, None, DEVICE)
    assert (layer.group, layer.scales.shape) == (group, (num_inputs // group, 48))
    x = torch.randn(5, num_inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = nn.functional.linear(x.float(), own.decode())
    found = layer(x.to(DEVICE)).float().cpu()
    torch.testing.assert_close(found, wanted, atol=4e-2 * float(wanted.abs().max()), rtol=0)


def test_which_e_4_m_3_is_not_known() -> None:
    assert float8_product.unknown(weight()) == "codes other than e4m3"
    assert float8_product.unknown(float8("output", 40)) == "40 x 256 weights in groups of 256"
    groups = GroupedWeight.of_codes(torch.zeros(48, 256).to(torch.float8_e4m3fn), torch.ones(48, 4), 64)
    assert float8_product.unknown(groups) == "48 x 256 weights in groups of 64"


@pytest.mark.parametrize("kind", ["output", "block"])
def test_layers_are_joined(kind: str, blocks: None) -> None:
    """Of 4 bits and e4m3; the parts read the joined weight."""
    some = [float8(kind, 64, seed=i) for i in range(3)]
    made: list[Any] = [Float8Linear.of(own, torch.randn(64) if i else None, DEVICE) for i, own in enumerate(some)]
    x = torch.randn(2, 256).bfloat16().to(DEVICE)
    wanted = torch.cat([layer(x) for layer in made], 1)
    assert torch.equal(Float8Linear.join(made)(x), wanted)
    assert torch.equal(torch.cat([layer(x) for layer in made], 1), wanted)
    assert len({layer.codes.untyped_storage().data_ptr() for layer in made}) == 1
    codes = torch.randint(16, (192, 256), dtype=torch.uint8)
    whole = GroupedWeight.of_codes(codes, torch.rand(192, 4), 64, table=torch.arange(-8, 8))
    made = [Int4Linear.of(whole.rows(rows), None, DEVICE) for rows in torch.arange(192).split(64)]
    wanted = torch.cat([layer(x) for layer in made], 1)
    assert torch.equal(Int4Linear.join(made)(x), wanted)
    assert torch.equal(torch.cat([layer(x) for layer in made], 1), wanted)


@pytest.mark.parametrize(
    ("rounds", "capability", "text"),
    [
        (False, (9, 0), "activations are not to be rounded"),
        (True, (8, 6), "e4m3 needs compute capability 8.9, and this GPU has 8.6"),
        (True, (9, 0), None),
    ],
)
def test_where_e4m3_is_decoded(
    rounds: bool, capability: tuple[int, int], text: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Exactly, and it is said once."""
    own = float8("output")
    model = nn.Sequential(*(GroupedLinear(own, torch.bfloat16, None) for _ in range(2)))
    monkeypatch.setattr(gpu_weights, "capability_of", lambda device: capability)
    gpu_weights.place(model, torch.bfloat16, DEVICE, "some", rounds=rounds)
    if text is None:
        assert [type(layer) for layer in model] == [Float8Linear] * 2
        assert not caplog.records
        return
    assert [torch.equal(layer.weight, own.decode().bfloat16().to(DEVICE)) for layer in model] == [True, True]
    assert [record.getMessage() for record in caplog.records] == [
        f"some: 2 layers are decoded to torch.bfloat16: 2 for {text}"
    ]


def placed(settings: ModelSettings, dtype: torch.dtype) -> Any:
    config = checkpoint.load_config(settings)
    files = CheckpointFiles(settings.model)
    stored = files.stored_format
    assert stored is not None
    with ExitStack() as stack:
        source = PackedSource(files, stored, stack)
        model, names = assemble(source, config, dtype, settings.model, on_cpu=False)
    assert not checkpoint.unused_tensors(names, model)
    gpu_weights.place(model, dtype, DEVICE, "some")
    return model.to(DEVICE)  # type: ignore[arg-type]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("form", ["w4a16", "w4a16 asymmetric", "gptq act-order", "w8a8", "nvfp4", "fp8", "fp8 w8a8"])
def test_a_checkpoint_answers_as_the_weights_it_stands_for(
    form: str, tmp_path: Path, tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    kind = Float8Linear if form.startswith("fp8") else Int4Linear
    count = 0 if form in {"w8a8", "nvfp4"} else 14
    model = tools.build("llama", **SIZES, attention_bias=True)
    settings = write(model, tmp_path, *FORMATS[form]())
    made = placed(settings, torch.bfloat16)
    kinds = [type(module) for module in made.modules()]
    assert (kinds.count(kind), kinds.count(GroupedLinear)) == (count, 0)
    assert ("14 layers are decoded to torch.bfloat16: 14 for codes" in caplog.text) is (count == 0)
    assert made.get_memory_footprint() > sum(
        x.nbytes for module in made.modules() if type(module) is kind for x in module.buffers()
    )
    monkeypatch.setattr(checkpoint, "load_model", lambda *_, **__: made)
    engine = load.load_engine(replace(settings, device=str(DEVICE), kv_cache_memory_bytes=1 << 24))
    assert engine.info.num_parameters == model.num_parameters()
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    found = tools.feed(engine, engine.pool.open(20), ids).float().cpu()
    # In bfloat16, or with activations of e4m3; with wrong scales it is 1.
    assert float((found - wanted).square().mean().sqrt() / wanted.std()) < (0.3 if kind is Float8Linear else 0.1)


def test_in_float32_all_are_decoded(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", **SIZES)
    made = placed(write(model, tmp_path, *FORMATS["gptq"]()), torch.float32)
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
    monkeypatch.setattr(gpu_weights, "capability_of", lambda device: (7, 5))
    with pytest.raises(
        ModelNotSupported, match=r"some holds quantised weights, .* this one has 7\.5: set device to cpu"
    ):
        gpu_weights.place(nn.Sequential(), torch.bfloat16, DEVICE, "some")

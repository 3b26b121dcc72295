"""Llama-shaped models in few launches: against transformers' own modules, and how many launches they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.compaction import Kept
from engine.cuda import (
    attention,
    decoder,
    float8,
    float8_kernels,
    kernels,
    rotary_attention,
    rotary_kernels,
)
from engine.cuda.decoder import FusedDecoder, unknown
from engine.cuda.float8 import Float8Linear, launch_rounding, round_rows
from engine.cuda.graphs import GraphRunner
from engine.engine import Engine, Segment
from engine.grouped_weight import GroupedWeight
from engine.loading import acceleration
from tests.engine.conftest import build
from tests.engine.cuda.launches import Counted, Launches, rerun
from tests.engine.quantised.test_gpu_weights import scaled_mm

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
Load = Callable[..., Engine]


@pytest.fixture
def load_fused(load_engine: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads an engine that a fused decoder runs: in Triton's interpreter where there is no GPU.

    There the check at load takes seconds; without ``is_checked`` it is left out.
    """

    def load(name: str, dtype: str = "float32", *, is_checked: bool = True) -> Engine:
        if DEVICE != "cpu":
            return load_engine(name, device=DEVICE, dtype=dtype, kv_cache_memory_bytes=200_000)
        fused: list[Any] = []
        made: list[Any] = []

        def runners(engine: Engine, model: Any, shapes: Any, *_: Any, **__: Any) -> Any:
            fused.append(acceleration.fused_decoder(engine, model, shapes))
            if fused[0] is not None:
                made.append(engine.torch_runner("fused cuda graphs", attention, fused[0]))
                yield from made[:is_checked]
            yield engine.torch_runner("torch attention")

        monkeypatch.setattr(acceleration, "runners", runners)
        engine = load_engine(name, dtype=dtype, kv_cache_memory_bytes=200_000)
        if not is_checked:
            engine.use(made[0])
        return engine

    return load


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "float32"),
        *(
            pytest.param(name, "float32", marks=pytest.mark.exhaustive)
            for name in ("llama", "qwen2", "mistral", "llama_yarn")
        ),
        pytest.param("llama", "float16", marks=pytest.mark.exhaustive),
    ],
)
def test_it_passes_the_check_at_load(name: str, dtype: str, load_fused: Load) -> None:
    """Ragged chunks, trees and their paths; a window; norms of queries and keys; biases."""
    assert load_fused(name, dtype).runner.name == "fused cuda graphs"


def test_replayed_passes_leave_logits_and_hidden_states(
    load_fused: Load, load_engine: Load, tools: SimpleNamespace
) -> None:
    engine = load_fused("llama", is_checked=False)
    plain = load_engine("llama", device=DEVICE, enforce_eager=True)
    if DEVICE == "cpu":
        fused_runner: Any = engine.runner

        fused_runner.graphs = GraphRunner(
            fused_runner.run_modules,
            rerun,
            **engine.limits,
            device=engine.device,
            forward_with_states=fused_runner.run_modules_with_states,
            hidden_size=engine.hidden_size,
        )
    answers = []
    for own in (engine, plain):
        one, two = own.pool.open(20), own.pool.open(20)
        layers = (0, 1, 2, -1)
        logits, states = own.forward_with_states(
            [Segment(one, tools.random_ids(3, 1), 2, 3, layers), Segment(two, tools.random_ids(1, 2), 1)]
        )
        found = [logits.cpu(), states.of(0).float()]
        tree = Segment(one, [3, 4, 5], 3, parents=(-1, -1, 1))
        found.append(own.forward([tree, Segment(two, [9], 1)]).cpu())
        own.keep_rows([Kept(one, 3, (1, 2))])
        found.append(own.forward([Segment(one, [8], 1)]).cpu())
        answers.append(found)
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=2**-7)
    assert plain.runner.name != engine.runner.name


def test_the_modules_read_the_joined_weights(load_stock: Callable[[str], PreTrainedModel]) -> None:
    model: Any = load_stock("qwen2")
    ids = torch.arange(5)[None]
    before = model(ids).logits
    pool = [(torch.empty(2, 2, 4, 8), torch.empty(2, 2, 4, 8))] * 2
    FusedDecoder(model, pool, [None, None])
    projections = model.model.layers[0].self_attn
    assert (
        projections.q_proj.weight.untyped_storage().data_ptr() == projections.v_proj.weight.untyped_storage().data_ptr()
    )
    torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.parametrize(
    ("name", "text"), [("gemma2", "Gemma2ForCausalLM is none of"), ("llama", None), ("dynamic", "rotary embedding")]
)
def test_what_it_does_not_know_is_left_to_the_modules(name: str, text: str | None) -> None:
    caches = [(torch.empty(2, 2, 4, 8), torch.empty(2, 2, 4, 8))] * 2
    reason = unknown(build(name), caches)
    assert (reason is None) if text is None else text in str(reason)


def test_a_rank_of_a_split_model_is_run_fused() -> None:
    """Its layers that exchange data are called as they are; here the rank is alone."""
    from engine.batch import build_batch
    from engine.kv_pool import KVPool
    from engine.parallel.shards import GatheredLinear, SummedEmbedding, SummedLinear

    alone: Any = SimpleNamespace(place=SimpleNamespace(size=1), sum=lambda x: x, gather=lambda x: x[None])
    model: Any = build("llama").to(DEVICE)
    wanted = model(torch.tensor([[1, 2, 3]], device=DEVICE)).logits[0]
    for layer in model.model.layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, alone)
        layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj, alone)
        layer.self_attn.q_proj.out_features *= 2  # of all ranks together
    model.model.embed_tokens = SummedEmbedding(model.model.embed_tokens, 0, alone)
    model.lm_head = GatheredLinear(model.lm_head, model.config.vocab_size, alone)
    attention = model.model.layers[0].self_attn
    size = 3, attention.k_proj.out_features // attention.head_dim, 4, attention.head_dim
    caches = [(torch.empty(size, device=DEVICE), torch.empty(size, device=DEVICE)) for _ in model.model.layers]
    assert unknown(model, caches) is None
    segments = [Segment(KVPool(2, 4).open(4), [1, 2, 3], 3)]
    batch = build_batch(segments, block_size=4, vocab_size=97, max_model_len=8).to(torch.device(DEVICE))
    with torch.inference_mode():
        found = FusedDecoder(model, caches, [None] * len(caches)).logits(batch)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def to_float8(model: Any, group: int | None = None) -> None:
    """Linear layers but the last one in e4m3, as a GPU gets them: a scale per output, or per 128 inputs."""
    for parent in list(model.model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, torch.nn.Linear):
                weight = layer.weight.float().cpu()
                groups = weight.view(len(weight), -1, group or weight.shape[1])
                scales = groups.abs().amax(2) / 448
                codes = (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
                grouped = GroupedWeight.of_codes(codes, scales, group or weight.shape[1])
                setattr(parent, name, Float8Linear.of(grouped, layer.bias, layer.weight.device))


@pytest.mark.parametrize("group", [None, 128])
def test_weights_in_e4m3_are_multiplied_by_rounded_rows(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused as by the modules; Triton's interpreter has no bfloat16, and halves numbers where rounding carries."""
    from engine.batch import build_batch
    from engine.kv_pool import KVPool

    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    if DEVICE == "cpu":
        multiply = partial(scaled_mm, wanted_dtype=dtype)
        monkeypatch.setattr(torch, "_scaled_mm", multiply)
    model: Any = build("llama", hidden_size=128, intermediate_size=256, head_dim=32, attention_bias=True)
    model = model.to(DEVICE, dtype).requires_grad_(False)
    to_float8(model, group)
    wanted = model(torch.tensor([[1, 2, 3, 4, 5]], device=DEVICE)).logits[0]
    size = 3, model.config.num_key_value_heads, 4, 32
    caches: list[Any] = [
        tuple(torch.empty(size, device=DEVICE, dtype=dtype) for _ in range(2)) for _ in model.model.layers
    ]
    assert unknown(model, caches) is None
    segments = [Segment(KVPool(3, 4).open(5), [1, 2, 3, 4, 5], 5)]
    batch = build_batch(segments, block_size=4, vocab_size=97, max_model_len=8).to(torch.device(DEVICE))
    with torch.inference_mode():
        fused = FusedDecoder(model, caches, [None] * len(caches))
        found = fused.logits(batch)
    distance = (found - wanted).float().square().mean().sqrt() / wanted.float().std()
    assert float(distance) < 0.4  # with the wrong scales it is 1.4
    model.model.layers[0].self_attn.v_proj = torch.nn.Linear(128, 64)
    assert unknown(model, caches) == "linear layers that are neither plain nor quantised alike"


def launches_of(num_layers: int, monkeypatch: pytest.MonkeyPatch, *, is_fused: bool, is_float8: bool) -> int:
    """Of a step in bfloat16 over a text that is split; kernels of our own are counted and not run. Not fused: by the
    modules.
    """
    from engine.batch import build_batch
    from engine.kv_pool import KVPool
    from engine.layers import PAGED, allocate_caches, record_layers
    from engine.modules import ModelModules

    cpu = torch.device("cpu")
    model = build("llama", num_hidden_layers=num_layers).bfloat16()
    shapes, vocab_size = record_layers(model, num_layers, cpu)
    model.set_attn_implementation(PAGED)
    caches = allocate_caches(shapes, 50, 16, cpu)
    if is_float8:
        to_float8(model)
    modules = ModelModules(model, shapes, caches, device=cpu)
    sequence = KVPool(50, 16).open(800)
    sequence.length = 560
    batch = build_batch([Segment(sequence, [1], 1)], block_size=16, vocab_size=vocab_size, max_model_len=800)

    rotary_attention._zeros(cpu, 1)  # noqa: SLF001 - a thread makes its counters in its first step
    with Launches() as launches, torch.inference_mode():
        monkeypatch.setattr(rotary_kernels, "rotate_attend", Counted("rotate_attend", launches))
        for name in ("attend", "join", "write", "add_norm", "angles", "silu_multiply"):
            monkeypatch.setattr(kernels, name, Counted(name, launches))
        monkeypatch.setattr(float8_kernels, "round_rows", Counted("round_rows", launches))
        monkeypatch.setattr(decoder, "round_rows", launch_rounding)
        monkeypatch.setattr(float8, "round_rows", launch_rounding)
        if is_float8:  # what a CPU multiplies, and by how many operations, differs between versions of torch

            def multiply(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
                launches.counts["_scaled_mm"] += 1
                return a.new_empty(len(a), b.shape[1], dtype=torch.bfloat16)

            monkeypatch.setattr(torch, "_scaled_mm", multiply)
        for module in (attention, rotary_attention):
            monkeypatch.setattr(module, "programs_of", lambda device: 528)
        if is_fused:
            fused = decoder.FusedDecoder(model, caches, [None] * num_layers)
            launches.counts.clear()
            fused.logits(batch)
        else:
            modules.logits(batch, kernels=attention)
    monkeypatch.undo()
    return launches.counts.total()


@pytest.mark.parametrize(
    ("is_fused", "is_float8", "expected"),
    [(False, False, (40, 21)), (True, False, (8, 5)), (False, True, (47, 21)), (True, True, (8, 5))],
)
def test_launches_of_a_step(
    is_fused: bool, is_float8: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer, and the rest of a step."""
    two, three = (launches_of(n, monkeypatch, is_fused=is_fused, is_float8=is_float8) for n in (2, 3))
    assert (three - two, two - 2 * (three - two)) == expected


@pytest.mark.parametrize(("size", "group"), [(48, 48), (384, 128)])
@pytest.mark.parametrize("is_gated", [False, True])
def test_rows_are_rounded_as_by_torch(size: int, group: int, is_gated: bool) -> None:
    """But where the interpreter drops a carry, and halves the number."""
    x = torch.randn(5, size * (1 + is_gated), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[3] = 0
    wanted, found = (way(x, group, is_gated=is_gated) for way in (round_rows, launch_rounding))
    assert found.scales.stride() == wanted.scales.stride()
    torch.testing.assert_close(found.scales, wanted.scales)
    assert (found.codes.float() != wanted.codes.float()).float().mean() < 0.05
    assert (found.codes.float().abs() <= wanted.codes.float().abs() * 1.2).all()


@pytest.mark.parametrize("name", ["llama", "llama_yarn"])
def test_angles_are_those_of_the_module(name: str) -> None:
    """At the far end of a long text, too."""
    model: Any = build(name).to(DEVICE)
    fused = FusedDecoder(model, [(torch.empty(2, 2, 4, 8), torch.empty(2, 2, 4, 8))] * 2, [None, None])
    positions = torch.tensor([0, 1, 37, 4095, 131_071], device=DEVICE)
    x = torch.empty(5, 48, device=DEVICE)
    wanted = model.model.rotary_emb(x[None], positions[None])
    found = fused._angles(x, positions)  # noqa: SLF001
    for own, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, theirs[0], atol=1e-6, rtol=0)


def test_numbers_are_rounded_where_the_modules_round_them() -> None:
    """In half precision the kernels' results are the modules' to the bit, but for the last bits of a root."""
    x = torch.randn(3, 48, device=DEVICE).half()
    gate_up = torch.randn(3, 80, device=DEVICE).half()
    out = torch.empty(3, 40, device=DEVICE).half()
    kernels.silu_multiply[(3, 1)](gate_up, out, DIM=40, TILE=64)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, atol=0, rtol=2**-10)
    norm: Any = build("llama").model.norm.to(DEVICE).half()
    norm.weight.data = torch.randn(48, device=DEVICE).half()
    delta, summed = torch.randn_like(x), x.clone()
    normed = torch.empty_like(x)
    kernels.add_norm[(3,)](summed, delta, norm.weight, normed, 1e-6, DIM=48, PADDED_DIM=64, HAS_DELTA=True)
    assert torch.equal(summed, x + delta)
    wanted: Tensor = norm(x + delta)
    torch.testing.assert_close(normed, wanted, atol=0, rtol=2**-9)

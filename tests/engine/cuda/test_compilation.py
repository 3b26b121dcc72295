"""Every kernel compiles to machine code for the GPUs it is meant for; that needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: Compiles what some passes launch, without launching it, and prints a line per kernel.
PROGRAM = """
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    capability = 0

    def get_current_device(self):
        return self.capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_stream(self, device):
        return 0


driver.set_active(Driver())

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.batch import Batch
from engine.cuda import (
    attention, choice_kernels, choices, float8, float8_kernels, kernels, rotary_attention, rotary_kernels,
)
from engine.cuda.decoder import FusedDecoder
from engine.cuda.row_kernels import norm_rounded
from engine.plan import BatchPlan


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            compiled = self.kernel.warmup(*args, grid=grid, **options)
            is_hopper = "wgmma" in compiled.asm["ptx"]
            found = len(compiled.asm["cubin"]), compiled.metadata.shared, is_hopper, value_dim, compiled.hash
            print(Driver.capability, dtype, self.kernel.__name__, *found)

        return launch


NAMES = ("attend", "join", "write", "move", "add_norm", "angles", "silu_multiply")
for name in NAMES:
    setattr(kernels, name, Compiled(getattr(kernels, name)))
for name in ("choose", "walk", "forbid", "weigh"):
    setattr(choice_kernels, name, Compiled(getattr(choice_kernels, name)))
rotary_kernels.rotate_attend = Compiled(rotary_kernels.rotate_attend)
rotary_attention.programs_of = lambda device: 528
float8_kernels.round_rows = Compiled(float8_kernels.round_rows)
takes_all = sys.argv[2] == "True"
for Driver.capability, dtype, heads, kv_heads, dim, value_dim in eval(sys.argv[1], {"torch": torch}):
    for num_rows, is_tree, window, softcap, has_sinks in ((1, True, 1024, 30.0, True), (512, False, None, None, False)):
        k_cache = torch.empty(3, kv_heads, 32, dim, dtype=dtype)
        v_cache = torch.empty(3, kv_heads, 32, value_dim, dtype=dtype)
        rows, sizes = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
        plan = BatchPlan(rows, rows, sizes, sizes[None], sizes[1:], 4096, num_rows, 32, rows if is_tree else None)
        query = torch.empty(num_rows, heads, dim, dtype=dtype)
        sinks = query[0, :, 0].contiguous() if has_sinks else None
        attention.paged_attention(query, k_cache, v_cache, plan, 0.1, window, softcap, 528, sinks=sinks)
        attention.write_kv(k_cache, v_cache, query[:, :kv_heads], query[:, :kv_heads, :value_dim], plan)
        for max_kv_len in (600, 2000, 100_000):  # as the text grows
            longer = BatchPlan(rows, rows, sizes, sizes[None], sizes[1:], max_kv_len, num_rows, 32)
            attention.paged_attention(query, k_cache, v_cache, longer, 0.1, None, None, 528)
        if dim == value_dim:
            config = LlamaConfig(
                vocab_size=50, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=dim
            )
            kind = (LlamaForCausalLM, Qwen3ForCausalLM)[is_tree]
            model = kind(config if kind is LlamaForCausalLM else Qwen3Config(**config.to_dict())).to(dtype)
            FusedDecoder(model, [(k_cache, v_cache)], [None]).logits(Batch(plan, rows[None], rows[:1], [], []))
            norm = query[0, 0] if is_tree else None
            kinds = ((None, False), (heads * dim, True), (128, True))
            for group, joins in kinds if takes_all else kinds[:2] if is_tree else kinds[2:]:
                if group is None or (Driver.capability >= 89 and dtype == torch.bfloat16):
                    qkv = torch.empty(num_rows, heads + 2 * kv_heads, dim, dtype=dtype)
                    around = rotary_attention.Around(query[:, 0], query[:, 0], norm, norm, 1e-5, group)
                    rotary_attention.rotary_attention(qkv, k_cache, v_cache, plan, around, 0.1, window, joins=joins)
        attention.move_entries([k_cache, v_cache], [(1, 1, 1, 0)])
    if Driver.capability >= 89 and dtype == torch.bfloat16:
        for num_rows in (1, 3):
            x = torch.empty(num_rows, 2048, dtype=dtype)
            float8.launch_rounding(x, 1024, is_gated=True)
            float8.launch_rounding(x, 128)
            norm_rounded(x, x, x[0], 1e-5, 2048)
    for count in (1, 2):  # whatever the batch, they are compiled once
        masks = [None, torch.zeros(5, 4000 + count, dtype=torch.int32)]
        walks = [choices.Walk(range(5), [1, 2, 3, 4], [-1, 0, 0, 1], 0.5, [7] * 5, own) for own in masks[:count]]
        choices.walk(torch.empty(5, 128_256), walks, 128_000 + count)
        logits, rows = torch.empty(4 + count, 128_000 + count), torch.empty(4 + count, 1, dtype=torch.float64)
        choices.weights(logits, rows.float(), rows)
        choices.weights(logits, rows.float(), rows, rows[:, 0].long())
        for min_p in (None, rows):
            choices.mass(logits, rows.float(), rows, min_p)
        choices.forbid(torch.empty(5, 128_256), range(5), masks[1:], 128_000 + count)
"""

#: Shared memory that a block may have on every GPU since Ampere.
SHARED_BYTES = 99 * 1024


#: Compute capability, data type, heads, heads of keys, their size and that of values. Each kind of rotary attention
#: (joined or not, rounded in groups of each size) is compiled for one number of rows; with ``MORE`` for both.
SOME = """(
    (90, torch.bfloat16, 32, 8, 128, 128),
)"""
MORE = """(
    (90, torch.bfloat16, 32, 8, 128, 128),
    (90, torch.bfloat16, 16, 16, 192, 128),
    (80, torch.float16, 32, 8, 128, 128),
    (90, torch.float32, 32, 8, 128, 128),
    (90, torch.bfloat16, 8, 4, 256, 256),
)"""


@pytest.mark.parametrize("given", [SOME, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["some", "more"])
def test_every_kernel_compiles(given: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given, str(given is MORE)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    compiled = {(capability, dtype): set() for capability, dtype, *_ in lines}
    for capability, dtype, name, *_ in lines:
        compiled[capability, dtype].add(name)
    assert all(names >= {"attend", "join", "write", "move"} for names in compiled.values())
    assert any(names >= {"add_norm", "angles", "rotate_attend", "silu_multiply"} for names in compiled.values())
    assert {dtype for _, dtype in compiled} == set(re.findall(r"torch\.\w+", given))
    num_gpus = len({line[0] for line in lines})
    for name, count in (
        ("choose", num_gpus),
        ("walk", num_gpus),
        ("forbid", num_gpus),
        ("weigh", 4 * num_gpus),
    ):
        variants = {line[-1] for line in lines if line[2] == name}
        assert len(variants) == count, "compiled once for any batch"
    assert len({line[-1] for line in lines if line[2] == "round_rows"}) == 2
    joins = [line for line in lines if line[2] == "join"]
    kinds = {(capability, dtype, value_dim) for capability, dtype, *_, value_dim, _ in joins}
    assert len({line[-1] for line in joins}) == len(kinds), "compiled once for any length"
    on_hopper = {(line[0], line[2]) for line in lines if line[5] == "True"}
    assert on_hopper == {("90", "attend"), ("90", "rotate_attend")}, "they use its tensor cores"
    for _, _, _, num_bytes, shared, *_ in lines:
        assert int(num_bytes) > 1000
        assert int(shared) <= SHARED_BYTES

"""What recurrent layers cost on a CPU: models of 200 M random weights in the shapes of Qwen3.5, Nemotron-H and Llama.

``python -m benchmarks.hybrids`` times passes of all three in turn: decoding, verification of 4 drafted tokens and a
prompt. Decoding is set against the time in which the same threads read the weights and the recurrent states once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.engine import read_bandwidth
from specdec.flags import Parser
from specdec.process.cores import usable_cores
from specdec.settings import QUANTIZATIONS

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.kv_sequence import KVSequence

#: Of all shapes.
SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
#: By name: the model type and the rest of its configuration.
SHAPES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "Qwen3.5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 12,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
            "intermediate_size": 2816,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            "num_hidden_layers": 22,
            "layers_block_type": (["mamba", "mlp"] * 3 + ["attention"] + ["mamba", "mlp"] * 2) * 2,
            "intermediate_size": 5376,
            "head_dim": 128,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
    ),
    "Llama": ("llama", {"num_hidden_layers": 12, "intermediate_size": 5120, "head_dim": 128}),
}
CONTEXT: Final = 128
DECODE, VERIFY, PROMPT = 1, 5, 256  # rows of a pass
_READ_BYTES: Final = 256 * 2**20
_MIN_ROUNDS: Final = 3


@dataclass(slots=True)
class MeasuredShape:
    """An engine, a sequence behind a context, and seconds of passes by their rows."""

    engine: Engine
    sequence: KVSequence
    #: Of what a pass reads: the weights of linear layers and one sequence's states.
    num_bytes: int
    times: dict[int, list[float]] = field(default_factory=dict)

    def run(self, rows: int) -> float:
        """Seconds of a pass."""
        from engine.engine import Segment  # noqa: PLC0415 (torch)

        self.engine.use(self.engine.runner)  # with its number of threads
        self.engine.pool.rollback(self.sequence, 0 if rows >= CONTEXT else CONTEXT)
        start = time.perf_counter()
        self.engine.forward(
            [Segment(self.sequence, [7 + i % 4000 for i in range(rows)], 1 if rows == PROMPT else rows)]
        )
        elapsed = time.perf_counter() - start
        if rows >= CONTEXT:
            self.engine.pool.rollback(self.sequence, 0)
            self.engine.forward([Segment(self.sequence, list(range(7, 7 + CONTEXT)), 1)])
        return elapsed

    def ms(self, rows: int) -> float:
        """Median."""
        return 1e3 * median(self.times[rows])


def load_shape(name: str, folder: Path, quantization: str | None, threads: int) -> MeasuredShape:
    """Write a model of random weights and load it."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    from engine.engine import Segment  # noqa: PLC0415
    from engine.loading import load  # noqa: PLC0415
    from specdec.settings import ModelSettings  # noqa: PLC0415

    kind, options = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    num_weights = model.num_parameters() - model.get_input_embeddings().weight.numel()
    del model
    engine = load.load_engine(
        ModelSettings(
            model=str(folder), device="cpu", dtype="float32", quantization=quantization, num_threads=threads,
            kv_cache_memory_bytes=2**30,
        )
    )  # fmt: skip
    num_bytes = num_weights * (4 if quantization is None else 1)
    num_bytes += sum(cache.state[0].nbytes for cache in engine.state_caches if not isinstance(cache, torch.Tensor))
    sequence = engine.pool.open(2 * PROMPT)
    engine.forward([Segment(sequence, list(range(7, 7 + CONTEXT)), 1)])
    return MeasuredShape(engine, sequence, num_bytes)


def measure(shapes: Sequence[MeasuredShape], seconds: float, threads: int) -> float:
    """Time the passes of all shapes in turn; returns the bandwidth in bytes/s, the median."""
    import torch  # noqa: PLC0415

    memory = torch.ones(_READ_BYTES // 4, dtype=torch.int32)
    bandwidths: list[float] = []
    ends = time.perf_counter() + seconds
    while len(bandwidths) < _MIN_ROUNDS or time.perf_counter() < ends:
        bandwidths.append(read_bandwidth(memory, threads))
        for shape in shapes:
            for rows in (DECODE, VERIFY, PROMPT):
                shape.run(DECODE)  # wakes its threads
                shape.times.setdefault(rows, []).append(shape.run(rows))
    return median(bandwidths)


def table_of(shapes: Mapping[str, MeasuredShape], bandwidth: float) -> Table:
    """The numbers for people."""
    titles = ("MB read", "decode(1) ms", "of reading once", "verify(5) / decode(1)", f"prompt of {PROMPT}, ms")
    table = Table("shape", *titles)
    for name, shape in shapes.items():
        table.add_row(
            name,
            f"{shape.num_bytes / 1e6:.0f}",
            f"{shape.ms(DECODE):.2f}",
            f"{shape.ms(DECODE) / 1e3 * bandwidth / shape.num_bytes:.2f}",
            f"{shape.ms(VERIFY) / shape.ms(DECODE):.2f}",
            f"{shape.ms(PROMPT):.0f}",
        )
    return table


def main() -> int:
    """Measure and print."""
    flags = Parser("python -m benchmarks.hybrids", description=__doc__)
    flags.add_argument("--shapes", type=command.names(tuple(SHAPES)), default=tuple(SHAPES), help="default: all")
    flags.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights")
    flags.add_argument("--threads", type=int, default=usable_cores(), help="default: all cores")
    flags.add_argument("--seconds", type=float, default=20.0, help="at least three rounds are made")
    args = flags.parse_args()
    console = Console(width=130)
    with console.status("measuring"), tempfile.TemporaryDirectory() as scratch:
        shapes = {name: load_shape(name, Path(scratch, name), args.quantization, args.threads) for name in args.shapes}
        bandwidth = measure(list(shapes.values()), args.seconds, args.threads)
    console.print(f"{args.threads} threads; memory is read at {bandwidth / 1e9:.1f} GB/s")
    console.print(table_of(shapes, bandwidth))
    return 0


if __name__ == "__main__":
    command.run("benchmarks.hybrids", main)

"""Settings of one model and of the steps it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from specdec.settings.option import about, check_options, option, require

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS: Final = ("int8", "int4", "auto")
AUTOTUNE: Final = ("cached", "always", "off")
#: vLLM's other names of types.
DTYPE_ALIASES: Final[Mapping[str, str]] = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model and the machine it runs on."""

    GROUPS: ClassVar = {"model": "model"}

    model: str = field(metadata=about("folder of the checkpoint, in Hugging Face format"))
    tokenizer: str | None = option(None, "folder of another tokenizer than the model's")
    dtype: str = option("auto", "type of weights and activations", choices=(*DTYPES, *DTYPE_ALIASES))
    # A checkpoint that is quantised already loads as it is.
    quantization: str | None = option(
        None, "8- or 4-bit weights, on a CPU; auto: int8 where possible", choices=QUANTIZATIONS
    )
    quantized_activations: str = option(
        "int8",
        "with quantised weights on a CPU, and FP8 on a GPU: rounded to 8 bits, or as they are",
        choices=("int8", "float"),
    )
    device: str = option("auto", "auto, cpu or cuda:N")
    max_model_len: int | None = option(None, "longest sequence in tokens; by default the checkpoint's", gt=0)
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory for weights, activations and KV", gt=0, le=1)
    cpu_kv_cache_share: float = option(0.2, "share of the machine's memory for the KV cache on a CPU", gt=0, le=1)
    kv_cache_memory_bytes: int | None = option(
        None, "bytes of a target's KV cache, per rank; overrides the shares", gt=0
    )
    block_size: int = option(32, "tokens per KV block", gt=0)
    num_threads: int | None = option(None, "threads of a forward pass on a CPU; by default all cores", gt=0)
    autotune: str = option(
        "cached", "measures the kernels: once a machine and model, at every load, or never", choices=AUTOTUNE
    )
    tensor_parallel_size: int = option(1, "processes (ranks) that share the weights of the target", ge=1, le=64)
    tensor_parallel_timeout_s: float = option(60.0, "seconds a rank waits for another before all end", gt=0)
    trust_remote_code: bool = option(False, "run model code that comes with the checkpoint")
    enforce_eager: bool = option(False, "run the model's own modules and capture no CUDA graphs, though slower")

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        require(bool(self.model), "model", "model is empty; give the folder of a Hugging Face checkpoint")
        require(
            self.quantization in (None, "auto") or not self.enforce_eager,
            "quantization",
            "quantization needs the packed layers that enforce_eager switches off; give one of the two",
        )
        require(
            self.tensor_parallel_size == 1 or self.device in {"auto", "cpu", "cuda", "cuda:0"},
            "device",
            f"device is {self.device!r}, but each of {self.tensor_parallel_size} ranks takes a GPU of its own: leave it"
            " out and choose GPUs with CUDA_VISIBLE_DEVICES",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How many sessions a model service runs and how much one step feeds."""

    GROUPS: ClassVar = {"scheduling": "max_num_seqs"}

    max_num_seqs: int = option(256, "sessions open at once", gt=0)
    # Prefill chunks fill what decoding leaves.
    max_num_batched_tokens: int = option(512, "tokens fed per step", gt=0)
    max_waiting: int = option(256, "sessions that wait to be admitted; one more gets RESOURCE_EXHAUSTED", gt=0)
    max_wait_s: float = option(30.0, "seconds a session waits before it gets RESOURCE_EXHAUSTED", gt=0)
    enable_prefix_caching: bool = option(True, "prompts that begin alike are computed once, for clients of one key")

    def __post_init__(self) -> None:
        check_options(self)

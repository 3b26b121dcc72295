"""Settings of every service: frozen, validated once, each default written here and nowhere else.

Field names are vLLM's where vLLM has the option. Command lines read their defaults from these classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Final, Self, get_args, get_type_hints

from specdec.errors import InvalidRequest
from specdec.methods import HEAD_METHODS, LOOKUP_METHODS, METHODS, MODEL_METHODS, refuse_mtp
from specdec.rules import DEFAULT_RULE, Rule
from specdec.tree_shape import TreeShape

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "auto")
#: vLLM's other names of types.
DTYPE_ALIASES: Final[Mapping[str, str]] = {"half": "float16", "float": "float32"}
#: What a value of JSON or of a caller may be, by the type of the field, and what to call it.
_KINDS: Final[Mapping[type, tuple[type, str]]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
    NoneType: (NoneType, "nothing"),
}


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(message, param=param)


def _check_types(settings: Any) -> None:
    """Refuse values of another type than their fields are, such as text for a number."""
    for name, kinds in _plain_fields(settings.__class__).items():
        value = getattr(settings, name)
        allowed = (bool,) if isinstance(value, bool) else kinds  # which counts as a whole number, too
        fits = any(kind in kinds and isinstance(value, _KINDS[kind][0]) for kind in allowed)
        wanted = " or ".join(_KINDS[kind][1] for kind in kinds)
        _require(fits, name, f"{name} is {value!r}; it must be {wanted}")


@cache
def _plain_fields(settings: type) -> dict[str, tuple[type, ...]]:
    """The types of the fields that hold plain values."""
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(settings).items()}
    return {name: types for name, types in kinds.items() if all(kind in _KINDS for kind in types)}


def _check_range(settings: Any, low: float, high: float, *names: str) -> None:
    """Refuse values outside [low, high], and NaN; None is left alone."""
    for name in names:
        value = getattr(settings, name)
        bounds = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        _require(value is None or low <= value <= high, name, f"{name} is {value}; it must be {bounds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model and the machine it runs on."""

    #: Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer).
    model: str
    #: Folder of the tokenizer; None means the model's own.
    tokenizer: str | None = None
    #: "auto" takes the checkpoint's.
    dtype: str = "auto"
    #: Weights of linear layers are rounded at load, on a CPU: "int8", "auto" for int8 where that can be done, or None
    #: for not at all. A checkpoint that is quantised already loads as it is.
    quantization: str | None = None
    #: "auto", "cpu" or "cuda:N".
    device: str = "auto"
    #: Longest sequence in tokens; None takes the checkpoint's.
    max_model_len: int | None = None
    #: CUDA: share of the device's memory for weights, activations and KV cache together.
    gpu_memory_utilization: float = 0.9
    #: CPU: share of the machine's memory the KV cache may take.
    cpu_kv_cache_share: float = 0.2
    #: Bytes of KV cache; given, it overrides the two shares.
    kv_cache_memory_bytes: int | None = None
    #: Tokens per KV block.
    block_size: int = 32
    #: Threads of the forward pass on a CPU; None takes all cores this process may use.
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    #: Run the model's own modules even where a faster path exists.
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        _require(bool(self.model), "model", "model is empty; give the folder of a Hugging Face checkpoint")
        _require(self.dtype in DTYPES, "dtype", f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        _require(
            self.quantization is None or self.quantization in QUANTIZATIONS,
            "quantization",
            f"quantization is {self.quantization!r}; choose one of {', '.join(QUANTIZATIONS)}, or none",
        )
        _require(
            self.quantization in (None, "auto") or not self.enforce_eager,
            "quantization",
            "quantization needs the packed layers that enforce_eager switches off; give one of the two",
        )
        for name in ("gpu_memory_utilization", "cpu_kv_cache_share"):
            share = getattr(self, name)
            _require(0.0 < share <= 1.0, name, f"{name} is {share}, outside (0, 1]")
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_threads"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, f"{name} is {value}; it must be above 0")
        _require(self.block_size > 0, "block_size", f"block_size is {self.block_size}; it must be above 0")
        _require(
            self.tensor_parallel_size == 1,
            "tensor_parallel_size",
            f"tensor_parallel_size is {self.tensor_parallel_size}: tensor parallelism is not available yet; use 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How many sessions a model service runs and how much one step feeds."""

    #: Sessions open at once.
    max_num_seqs: int = 256
    #: Rows (tokens fed) per step; prefill chunks fill what decoding leaves.
    max_num_batched_tokens: int = 512
    #: Sessions waiting to be admitted; one more gets RESOURCE_EXHAUSTED.
    max_waiting: int = 256
    #: Seconds a session waits for memory before it gets RESOURCE_EXHAUSTED.
    max_wait_s: float = 30.0
    #: Seconds a parked session is kept.
    park_ttl_s: float = 600.0

    def __post_init__(self) -> None:
        _check_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            _require(value > 0, field.name, f"{field.name} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Speculation, under the names of vLLM's ``speculative_config``."""

    #: Folder of the draft model or head; None with a method that needs none.
    model: str | None = None
    #: One of :data:`~specdec.methods.METHODS`, or two: a look-up, and what drafts where it has found too little. None
    #: means draft_model where a model is given, else none.
    method: str | tuple[str, ...] | None = None
    #: Drafted tokens a round at most.
    num_speculative_tokens: int = 4
    #: Longest and shortest n-gram looked up by "ngram".
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    #: Longest run of tokens that "suffix" matches and continues.
    suffix_decoding_max_tree_depth: int = 24
    #: Past requests whose output "suffix" keeps for all; 0 looks up in a request's own text only.
    suffix_decoding_max_cached_requests: int = 10000
    #: "suffix" drafts this many tokens at most for each one that matched.
    suffix_decoding_max_spec_factor: float = 1.0
    #: "suffix" drafts on while the drafted tokens together are at least this likely, by the counts of its trees.
    suffix_decoding_min_token_prob: float = 0.1
    #: Draft models and heads draft trees: so many children of each token that is drafted on after, and so many of those
    #: on each level; 1 drafts chains.
    tree_top_k: int = 1
    #: Levels of a tree at most; None takes half of num_speculative_tokens, 2 to 6.
    tree_depth: int | None = None
    #: A static tree in place of those two, as text: a list of nodes, each a tuple of ranks from the root down.
    speculative_token_tree: str | None = None
    draft_tensor_parallel_size: int = 1
    #: The draft model's :attr:`ModelSettings.quantization`. Rounding it costs a little acceptance and no exactness.
    quantization: str | None = "auto"
    #: Speculation pauses while more sessions than this are open; None never pauses.
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        methods = _read_methods(self.method or ("draft_model" if self.model else "none"))
        object.__setattr__(self, "method", methods if len(methods) > 1 else methods[0])
        needing = next((method for method in methods if method in MODEL_METHODS), None)
        _require(
            needing is None or self.model is not None,
            "model",
            f'method "{needing}" needs "model", the folder of the draft checkpoint',
        )
        _require(
            0 <= self.num_speculative_tokens <= 64,
            "num_speculative_tokens",
            f"num_speculative_tokens is {self.num_speculative_tokens}, outside [0, 64]",
        )
        _require(
            1 <= self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            f"prompt_lookup_min ({self.prompt_lookup_min}) and prompt_lookup_max ({self.prompt_lookup_max}) must"
            " satisfy 1 <= min <= max",
        )
        _require(
            self.draft_tensor_parallel_size == 1,
            "draft_tensor_parallel_size",
            f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}: not available yet; use 1",
        )
        _require(
            self.disable_by_batch_size is None or self.disable_by_batch_size >= 1,
            "disable_by_batch_size",
            f"disable_by_batch_size is {self.disable_by_batch_size}; it must be at least 1",
        )
        _check_range(self, 1, 512, "suffix_decoding_max_tree_depth")
        _check_range(self, 0, math.inf, "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor")
        _check_range(self, 0, 1, "suffix_decoding_min_token_prob")
        _check_range(self, 1, 64, "tree_top_k", "tree_depth")
        _ = self.tree

    @property
    def tree(self) -> TreeShape | None:
        """The trees to draft; None: chains.

        Raises:
            InvalidRequest: the settings describe none that can be drafted.
        """
        return TreeShape.of(self.tree_top_k, self.tree_depth, self.speculative_token_tree, self.num_speculative_tokens)

    @property
    def methods(self) -> tuple[str, ...]:
        """What drafts, in order of preference."""
        assert self.method is not None  # since __post_init__
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def needs_model(self) -> bool:
        """Whether a checkpoint is loaded to draft."""
        return any(method in MODEL_METHODS for method in self.methods)

    @property
    def reads_target(self) -> bool:
        """Whether tensors of the target's checkpoint are loaded to draft."""
        return any(method in HEAD_METHODS for method in self.methods)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | None) -> Self:
        """Read vLLM's ``speculative_config`` (a mapping or JSON text); an unknown key is an error naming it."""
        if config is None:
            return cls(method="none")
        if isinstance(config, str):
            try:
                config = json.loads(config)
            except json.JSONDecodeError as error:
                raise InvalidRequest(f"speculative_config is not JSON: {error}", param="speculative_config") from None
        if not isinstance(config, Mapping):
            raise InvalidRequest(
                f"speculative_config must be an object, not {type(config).__name__}", param="speculative_config"
            )
        known = {field.name for field in fields(cls)}
        for key in config:
            _require(
                key in known, key, f"speculative_config has no option {key!r}; it knows {', '.join(sorted(known))}"
            )
        settings = cls(**config)
        if settings.method == "suffix" and "num_speculative_tokens" not in config:  # vLLM's default, too
            settings = replace(settings, num_speculative_tokens=min(settings.suffix_decoding_max_tree_depth, 64))
        return settings


def _read_methods(given: Any) -> tuple[str, ...]:
    """One method's name, or a look-up's and another's, as a tuple."""
    methods = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if "mtp" in methods:
        refuse_mtp()
    for method in methods:
        _require(method in METHODS, "method", f"method is {method!r}; choose one of {', '.join(METHODS)}")
    first, *rest = methods
    _require(
        not rest or (len(rest) == 1 and first in LOOKUP_METHODS and rest[0] not in (first, "none")),
        "method",
        f"method is {list(methods)}; of two methods the first must be one of {', '.join(LOOKUP_METHODS)}, the second"
        " another one, and there can be no third",
    )
    return (first, *rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """A target service."""

    model: ModelSettings
    scheduler: SchedulerSettings = SchedulerSettings()
    #: Rule for sessions that name none.
    verification: Rule = DEFAULT_RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """A draft service. ``model`` is None for drafters without a model."""

    speculative: SpeculativeSettings
    model: ModelSettings | None = None
    #: Folder of the target's checkpoint, for heads, which use some of its tensors.
    target_model: str | None = None
    scheduler: SchedulerSettings = SchedulerSettings()

    def __post_init__(self) -> None:
        _require(
            self.target_model is not None or not self.speculative.reads_target,
            "target_model",
            f"a head ({', '.join(self.speculative.methods)}) uses tensors of the target: give target_model, the folder"
            " of the target's checkpoint",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a gRPC server listens and how it stops."""

    host: str = "127.0.0.1"
    #: 0 takes a free port.
    port: int = 0
    #: A Unix domain socket to listen on as well, for gateways on the same machine: "unix:/path", or on Linux
    #: "unix-abstract:name".
    socket: str | None = None
    #: Seconds open streams get to finish after SIGTERM.
    drain_s: float = 20.0
    #: Streams and calls at once; more get RESOURCE_EXHAUSTED.
    max_concurrent_rpcs: int = 1024

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range(self, 0, 65535, "port")
        _check_range(self, 0, math.inf, "drain_s")
        _check_range(self, 1, math.inf, "max_concurrent_rpcs")
        _require(
            self.socket is None or self.socket.startswith(("unix:/", "unix-abstract:")),
            "socket",
            f"socket is {self.socket!r}; write unix:/path or unix-abstract:name",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The gateway."""

    #: "host:port" of each target replica.
    targets: tuple[str, ...] = ()
    #: "host:port" of each draft replica; empty serves without speculation.
    drafts: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    #: Names the model answers to; empty takes the target's name.
    served_model_name: tuple[str, ...] = ()
    #: Folder of the tokenizer; None serves token ids only.
    tokenizer: str | None = None
    #: Jinja text or file that replaces the tokenizer's chat template.
    chat_template: str | None = None
    num_speculative_tokens: int = 4
    #: Proposals the draft may send ahead of each verdict, 15 at most; 0 drafts only after a verdict.
    num_ahead_proposals: int = 0
    #: A proposal drafted ahead goes to the target before its verdict when it is at least this likely to be needed;
    #: above 1 none does.
    min_offer_likelihood: float = 0.3
    disable_by_batch_size: int | None = None
    #: Every round asks for num_speculative_tokens; otherwise for as many drafted tokens as pay off, none included.
    fixed_draft_length: bool = False
    #: None leaves the choice to the target.
    verification: Rule | None = None
    #: Seconds a request may take when it names no deadline; None is unlimited.
    request_timeout_s: float | None = None
    #: Seconds a draft may take to answer before the round goes on without it.
    draft_timeout_s: float = 1.0
    #: Times a session is reopened on a target before the request fails with UNAVAILABLE.
    max_target_retries: int = 3
    #: Requests in flight; one more gets 429.
    max_concurrent_requests: int = 512
    #: Key of the seeds drawn for requests that give none; None takes the system's randomness.
    seed: int | None = None
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range(self, 0, 15, "num_ahead_proposals")
        _check_range(self, 0, 65535, "port", "grpc_port")
        _check_range(self, 0, 64, "num_speculative_tokens")
        _check_range(self, 0, math.inf, "min_offer_likelihood", "max_target_retries", "drain_s")
        _check_range(self, 1, math.inf, "disable_by_batch_size", "max_concurrent_requests")
        for name in ("request_timeout_s", "draft_timeout_s"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, f"{name} is {value}; it must be above 0")

"""Where the recurrent layers of a transformers model meet states that can be rolled back.

transformers writes every recurrence as a function beside the module that calls it, under one name for all families:
a causal convolution, the gated delta rule, the scans of Mamba. A mixer is a module whose forward calls some of them.
Under the names of :mod:`engine.layers` it runs the same code with functions of :mod:`engine.recurrent` in their place;
under any other it is as it was. So no family needs code of its own, and the check at load compares the two.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.layers import PAGED, RECORDING, ForwardState, keep_as_it_is
from engine.recurrent.convolution import ConvolutionShape, convolve
from engine.recurrent.delta_rule import DeltaRule, delta_shape
from engine.recurrent.even import run_evenly
from engine.recurrent.kernels import RecurrentKernels
from engine.recurrent.plan import StatePlan
from engine.recurrent.state_cache import StateCache, StateShape, run_pass
from engine.recurrent.state_space import Mamba2Scan, MambaScan, mamba2_shape, mamba_shape, time_steps
from specdec.errors import ModelNotSupported

#: What one call of a recurrence keeps of each sequence.
RecurrentShape: TypeAlias = ConvolutionShape | StateShape
RecurrentCache: TypeAlias = torch.Tensor | StateCache
#: In transformers' advice to install faster kernels of recurrences; its own run at load only.
_ADVICE: Final = "falling back to its reference"


@dataclass(slots=True)
class Mixer:
    """One module with recurrences, each called once in a pass, in one order."""

    module: nn.Module
    config: Any
    #: Of each call.
    shapes: list[RecurrentShape] = field(default_factory=list)
    caches: Sequence[RecurrentCache] = ()
    state: ForwardState | None = None
    #: Calls of the pass that is run.
    num_calls: int = 0
    #: Of each convolution its weight [taps, C] and bias, float32, as kernels read them.
    kernel_weights: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)

    @property
    def is_recording(self) -> bool:
        """Whether the pass finds out what the module calls."""
        return bool(self.config._attn_implementation == RECORDING)

    @property
    def kernels(self) -> RecurrentKernels | None:
        """Kernels of the pass that is run."""
        assert self.state is not None
        return None if self.state.kernels is None else self.state.kernels.RECURRENCES

    def bind(self, caches: Sequence[RecurrentCache], state: ForwardState) -> None:
        """Give the module an engine's caches, one for each of its shapes."""
        self.caches, self.state = caches, state

    def next_call(self, shape: RecurrentShape) -> tuple[RecurrentCache, StatePlan]:
        """The cache of the next call, and what the pass does to it."""
        batch = None if self.state is None else self.state.batch
        assert batch is not None, "the model was called outside Engine.forward"
        plan = batch.batch.states
        at, self.num_calls = self.num_calls, self.num_calls + 1
        if plan is None or at >= len(self.shapes) or self.shapes[at] != shape:
            raise ValueError(f"{type(self.module).__name__} calls other recurrences than it did while it was loaded")
        return self.caches[at], plan


def copy_states(caches: Sequence[RecurrentCache], copies: Sequence[tuple[int, int]]) -> None:
    """Copy states, records and inputs from place to place, one after the other."""
    with torch.inference_mode():
        for cache in caches:
            for part in [cache] if isinstance(cache, torch.Tensor) else [cache.state, *cache.records.values()]:
                for source, target in copies:
                    part[target] = part[source]


#: Functions of torch that compute an element, or a row, by where in a tensor it stands.
_UNEVEN: Final = frozenset({"sigmoid", "silu", "softplus", "linear", "act"})  # `act`: of transformers' GELU
#: A layer whose weight its parent multiplies by itself.
_READ_WEIGHT: Final = re.compile(r"\bself\.(\w+)\.weight @")


def adopt_mixers(model: PreTrainedModel) -> list[Mixer]:
    """Give the recurrences of a model to :mod:`engine.recurrent`; none where it has none that is known."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_concerns_passes)
    mixers = []
    uneven = []
    for module in model.modules():
        config = getattr(module, "config", model.config.get_text_config(decoder=True))
        forward = inspect.unwrap(type(module).forward)
        names = set(forward.__code__.co_names) if isinstance(forward, FunctionType) else set()
        if (adapter := _ADAPTERS.get(type(module).__name__)) is not None:
            mixers.append(Mixer(module, config))
            module.forward = partial(_forward, mixers[-1], partial(adapter, mixers[-1]), module.forward)
        elif called := _RECURRENCES.keys() & names:
            mixers.append(Mixer(module, config))
            changed = partial(_changed(forward, called, mixers[-1]), module)
            module.forward = partial(_forward, mixers[-1], changed, module.forward)
            read = _READ_WEIGHT.findall(inspect.getsource(forward))
            for name in read:
                keep_as_it_is(getattr(module, name))
            names |= {"sigmoid"} if read else set()
        if _UNEVEN & names:
            uneven.append(module)
    for module in uneven if mixers else ():
        module.forward = partial(run_evenly, module.forward)
    return mixers


def _concerns_passes(record: logging.LogRecord) -> bool:
    """False for an advice that would change no pass."""
    return _ADVICE not in record.getMessage()


def _changed(forward: FunctionType, called: Iterable[str], mixer: Mixer) -> FunctionType:
    """A module's own code with other recurrences."""
    own = {name: partial(_RECURRENCES[name], mixer, forward.__globals__[name]) for name in called}
    names = {**forward.__globals__, **own}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def check_recorded(mixers: Sequence[Mixer]) -> None:
    """Raise :class:`ModelNotSupported` unless the recording pass ran every mixer."""
    for mixer in mixers:
        if not mixer.shapes:
            raise ModelNotSupported(f"{type(mixer.module).__name__} has a recurrent state that a pass does not reach")


def _forward(mixer: Mixer, changed: Callable[..., Any], stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A mixer's forward: the changed one on states of an engine, or the module's own."""
    if mixer.config._attn_implementation not in (PAGED, RECORDING):
        return stock(*args, **kwargs)
    mixer.num_calls = 0
    if mixer.is_recording and mixer.shapes:
        raise ModelNotSupported(f"{type(mixer.module).__name__} runs twice in one pass (layers that share a module)")
    out = changed(*args, **kwargs)
    if not mixer.is_recording and mixer.num_calls != len(mixer.shapes):
        raise ValueError(f"{type(mixer.module).__name__} calls other recurrences than it did while it was loaded")
    return out


def _convolve(  # noqa: PLR0917 - a function of transformers
    mixer: Mixer,
    stock: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Channels first: [1, C, T] to [1, C, T]."""
    shape = ConvolutionShape(weight.shape[0], weight.shape[1], hidden_states.dtype)
    if mixer.is_recording:
        mixer.shapes.append(shape)
        return stock(hidden_states, weight, bias, activation=activation)
    rings, plan = mixer.next_call(shape)
    assert isinstance(rings, torch.Tensor)
    inputs = hidden_states[0].t()
    if mixer.kernels is not None:
        if mixer.num_calls not in mixer.kernel_weights:
            floats = None if bias is None else bias.float()
            mixer.kernel_weights[mixer.num_calls] = weight.t().float().contiguous(), floats
        taps, floats = mixer.kernel_weights[mixer.num_calls]
        out = mixer.kernels.convolve(rings, plan, inputs, weight=taps, bias=floats, activation=activation)
        if out is not None:
            return out.t()[None]
    return convolve(rings, plan, inputs, weight=weight, bias=bias, activation=activation).t()[None]


def _delta_rule(  # noqa: PLR0917 - a function of transformers
    mixer: Mixer,
    _: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, …] each, to [1, T, HV, V]."""
    shape = delta_shape(key, value, g)
    if mixer.is_recording:
        mixer.shapes.append(shape)
        return torch.zeros_like(value), None
    cache, plan = mixer.next_call(shape)
    assert isinstance(cache, StateCache)
    rows = {"log_decay": g[0], "beta": beta[0]}
    is_normalised = not use_qk_l2norm_in_kernel
    if mixer.kernels is not None:
        out = mixer.kernels.delta_rule(cache, plan, query[0], key[0], value[0], **rows, is_normalised=is_normalised)
    else:
        rule = DeltaRule(query[0], key[0], value[0], **rows, is_normalised=is_normalised)
        run_pass(cache, plan, rule)
        out = rule.outputs
    return out[None].to(query.dtype), None


def _mamba2_scan(  # noqa: PLR0917 - a function of transformers
    mixer: Mixer,
    _: Callable[..., Any] | None,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **__: Any,
) -> torch.Tensor:
    """[1, T, H, P] and [1, T, G, N], to float32 [1, T, H, P]."""
    shape = mamba2_shape(hidden_states, B)
    if mixer.is_recording:
        mixer.shapes.append(shape)
        return torch.zeros_like(hidden_states, dtype=torch.float32)
    steps = run_evenly(time_steps, dt, dt_bias, has_softplus=dt_softplus).clamp(*dt_limit)
    cache, plan = mixer.next_call(shape)
    assert isinstance(cache, StateCache)
    if mixer.kernels is not None:
        return mixer.kernels.mamba2(cache, plan, hidden_states[0], steps[0], a=A, b=B[0], c=C[0], d=D)[None]
    scan = Mamba2Scan(hidden_states[0], steps[0], a=A, b=B[0], c=C[0], d=D)
    run_pass(cache, plan, scan)
    return scan.outputs[None]


def _mamba_scan(  # noqa: PLR0917 - a function of transformers
    mixer: Mixer,
    _: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **__: Any,
) -> torch.Tensor:
    """Channels first: [1, C, T] and [1, N, T], to [1, C, T]."""
    shape = mamba_shape(hidden_states, B)
    if mixer.is_recording:
        mixer.shapes.append(shape)
        return torch.zeros_like(hidden_states)
    bias = None if delta_bias is None else delta_bias[..., None]
    steps = run_evenly(time_steps, dt, bias, has_softplus=delta_softplus)
    cache, plan = mixer.next_call(shape)
    assert isinstance(cache, StateCache)
    inputs, step_rows, b, c = hidden_states[0].t(), steps[0].t(), B[0].t(), C[0].t()
    if mixer.kernels is not None:
        rows = mixer.kernels.mamba(cache, plan, inputs, step_rows, a=A, b=b, c=c, d=D)
    else:
        scan = MambaScan(inputs, step_rows, a=A, b=b, c=c, d=D)
        run_pass(cache, plan, scan)
        rows = scan.outputs
    out = rows.t()[None]
    return out if z is None else out * run_evenly(nn.functional.silu, z)


def _lightning(mixer: Mixer, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """MiniMax's lightning attention (arXiv 2501.08313): [1, T, H] to the same.

    Its state is that of Mamba2 with v for the input, k for B, q for C and a decay that never changes.
    """
    module: Any = mixer.module
    heads, dim = module.num_attention_heads, module.head_dim
    query, key, value = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (heads, -1)).split(dim, dim=-1)
    steps = hidden_states.new_ones(*hidden_states.shape[:2], heads)
    out = _mamba2_scan(mixer, None, value, steps, -module.slope_rate.flatten(), key, query)
    out = module.norm(out.to(hidden_states.dtype).flatten(-2))
    return module.out_proj(module.output_gate(hidden_states).sigmoid() * out), None


#: Mixers whose recurrence is no function of its own in transformers.
_ADAPTERS: Final[dict[str, Callable[..., Any]]] = {"MiniMaxLightningAttention": _lightning}

_RECURRENCES: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}

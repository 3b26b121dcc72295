"""Splitting a model over ranks by transformers' own plan.

transformers reads each rank's part of the weights. Its modules then run on DTensors, which cost more than the products
of a small step. So every part becomes a plain tensor in a plain module here, which may be packed as any other, and
what ranks have to exchange is done by the three modules below.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.parallel.ranks import Ranks
from engine.parallel.split_mixers import split_mixer
from specdec.errors import InvalidRequest, ModelNotSupported

#: The styles of transformers' plans that are known here.
_STYLES: Final = (
    *("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "packed_colwise", "moe_tp_experts"),
    *("replicated_with_grad_allreduce", "replicate"),
)
_KEY_PROJECTIONS: Final = frozenset(("k_proj", "qkv_proj", "query_key_value"))
#: What several ranks hold the same rows of where there are fewer KV heads than ranks.
_SHARED_PROJECTIONS: Final = frozenset(("k_proj", "v_proj"))
_COLUMNS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED: Final = ("feed_forward.gate_proj", "feed_forward.up_proj")


def _plan(layers: str, colwise: Sequence[str], rowwise: Sequence[str]) -> dict[str, str]:
    rules = dict.fromkeys(colwise, "colwise") | dict.fromkeys(rowwise, "rowwise")
    return {f"{layers}.layers.*.{name}": style for name, style in rules.items()}


#: What transformers' plans lack, by the type of model. Recurrent layers are split by
#: :mod:`engine.parallel.split_mixers`.
_PLANS: Final = {
    "opt": _plan("model.decoder", (*_COLUMNS, "fc1"), ("self_attn.out_proj", "fc2")),
    "lfm2": _plan(
        "model", (*_COLUMNS, "feed_forward.w1", "feed_forward.w3"), ("self_attn.out_proj", "feed_forward.w2")
    ),
    "lfm3": _plan("model", (*_COLUMNS, "feed_forward.w1", "feed_forward.w3"), ("self_attn.o_proj", "feed_forward.w2")),
    "bamba": _plan("model", (*_COLUMNS, *_GATED), ("self_attn.o_proj", "feed_forward.down_proj")),
    "falcon_h1": _plan("model", (*_COLUMNS, *_GATED), ("self_attn.o_proj", "feed_forward.down_proj")),
    "granitemoehybrid": _plan("model", _COLUMNS, ("self_attn.o_proj", "shared_mlp.output_linear"))
    | {"model.layers.*.shared_mlp.input_linear": "packed_colwise"},
    "nemotron_h": _plan(
        "model",
        ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.up_proj"),
        ("mixer.o_proj", "mixer.down_proj"),
    ),
}


def plan_split(config: PreTrainedConfig, size: int, *, trust_remote_code: bool) -> object:
    """transformers' DistributedConfig for splitting a model over ``size`` ranks; no weight is read.

    Raises:
        InvalidRequest: transformers is too old.
        ModelNotSupported: transformers has no plan for it, the plan holds a style that is unknown here, the weights are
            quantised, or heads cannot be shared out.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415
    except ImportError as error:
        raise InvalidRequest(
            f"tensor_parallel_size is {size}, but transformers {transformers.__version__} is too old for it: install"
            " 5.23 or newer",
            param="tensor_parallel_size",
        ) from error
    remedy = "use tensor_parallel_size 1, or another model"
    if getattr(config, "quantization_config", None) is not None:
        raise ModelNotSupported(
            f"{config.model_type!r} is quantised already and cannot be split over {size} ranks: {remedy}"
        )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), trust_remote_code=trust_remote_code
        )
    name, own = type(model).__name__, _PLANS.get(config.model_type, {})
    own = own | {rule: "replicate" for rule in model.tp_plan or {} if ".linear_attn." in rule} | _of_tied(model)
    plan: dict[str, str] = (model.tp_plan or {}) | own
    if not any(".layers." in f".{rule}" or ".h." in rule for rule in plan):
        raise ModelNotSupported(
            f"{name} has no tensor-parallel plan in transformers, so it cannot be split over {size} ranks: {remedy}"
        )
    if unknown := sorted({style for style in plan.values() if style not in _STYLES}):
        raise ModelNotSupported(f"{name} has a plan with styles that are unknown here ({', '.join(unknown)}): {remedy}")
    num_heads, num_kv_heads = _num_heads(config)
    if num_heads % size:
        raise ModelNotSupported(
            f"{name} has {num_heads} heads (num_attention_heads), which do not divide by tensor_parallel_size {size}:"
            f" choose a divisor of {num_heads}"
        )
    projections = {rule: rule.rsplit(".", 1)[-1] for rule, style in plan.items() if style == "colwise"}
    if num_kv_heads % size and not _KEY_PROJECTIONS.isdisjoint(projections.values()):
        if size % num_kv_heads or not _SHARED_PROJECTIONS.issubset(projections.values()):
            raise ModelNotSupported(
                f"{name} has {num_kv_heads} KV heads (num_key_value_heads), which can neither be split over"
                f" tensor_parallel_size {size} nor repeated on it: choose a divisor of {num_kv_heads}"
            )
        own = own | {rule: "replicate" for rule, leaf in projections.items() if leaf in _SHARED_PROJECTIONS}
    return DistributedConfig(tp_size=size, tp_plan=own or None)


def _of_tied(model: Any) -> dict[str, str]:
    """Rules for an embedding and an output layer of one weight where transformers' plan has one for one of them."""
    both = (model.get_input_embeddings(), "embedding_rowwise"), (model.get_output_embeddings(), "colwise_gather_output")
    rules = {name: style for name, module in model.named_modules() for part, style in both if module is part}
    is_tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    return rules if is_tied and not rules.keys().isdisjoint(model.tp_plan or {}) else {}


def make_local(model: PreTrainedModel, ranks: Ranks) -> None:
    """Turn a model that transformers has split into plain modules on this rank's parts, in place."""
    plan: dict[str, str] = model.tp_plan or {}
    vocab_size = model.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
    rows_before = _rows_before(model, ranks)
    _drop_dtensors(model)
    for name, module in list(model.named_modules()):
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if style is None:
            continue
        module.__dict__.pop("forward", None)  # transformers' own exchange
        parent, _, leaf = name.rpartition(".")
        if style == "replicate" and leaf in _SHARED_PROJECTIONS:
            num_heads, num_kv_heads = _num_heads(model.config)
            _keep_own_head(module, num_kv_heads, ranks)
            attention: Any = model.get_submodule(parent)
            attention.num_key_value_groups = num_heads // ranks.place.size
        split = _split(module, style, ranks, vocab_size=vocab_size, rows_before=rows_before.get(name, 0))
        if split is not module:
            model.get_submodule(parent)._modules[leaf] = split
    for mixer in list(model.modules()):
        if (out := split_mixer(mixer, ranks)) is not None:
            mixer._modules["out_proj"] = SummedLinear(out, ranks)
    _count_heads(model, ranks)


def _split(module: Any, style: str, ranks: Ranks, *, vocab_size: int, rows_before: int) -> nn.Module:
    """The module that takes the place of one that the plan names."""
    if style == "rowwise":
        return SummedLinear(module, ranks)
    if style == "colwise_gather_output":
        return GatheredLinear(module, vocab_size, ranks)
    if style == "embedding_rowwise":
        return SummedEmbedding(module, rows_before, ranks)
    if style == "moe_tp_experts":
        module.register_forward_hook(lambda _module, _args, out: ranks.sum(out))
    kept: nn.Module = module
    return kept


def _num_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Heads and KV heads of a layer."""
    text = config.get_text_config(decoder=True)
    return text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _keep_own_head(projection: Any, num_kv_heads: int, ranks: Ranks) -> None:
    """Reduce a projection to the one KV head that this rank's heads attend to, in place."""
    head = ranks.place.rank * num_kv_heads // ranks.place.size
    projection.out_features //= num_kv_heads
    rows = slice(head * projection.out_features, (head + 1) * projection.out_features)
    for name, parameter in projection._parameters.items():
        if parameter is not None:
            projection._parameters[name] = nn.Parameter(parameter[rows].clone(), requires_grad=False)


def _count_heads(model: PreTrainedModel, ranks: Ranks) -> None:
    """Correct the number of heads that OPT's attention keeps; others count those that their projections give."""
    attention: Any
    for attention in model.modules():
        if type(attention).__name__ == "OPTAttention":
            attention.num_heads //= ranks.place.size


def _drop_dtensors(model: nn.Module) -> None:
    """Replace every DTensor by this rank's part; tied parameters stay tied."""
    local: dict[int, nn.Parameter] = {}
    originals: list[DTensor] = []  # an id is not used again while its object lives
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            originals.append(parameter)
            if id(parameter) not in local:
                part = parameter.to_local().detach().contiguous()
                local[id(parameter)] = nn.Parameter(part, requires_grad=False)
            module._parameters[name] = local[id(parameter)]


def _rows_before(model: nn.Module, ranks: Ranks) -> dict[str, int]:
    """Of every split embedding, the rows that the ranks before this one hold."""
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) and isinstance(weight, DTensor):
            found[name] = min(ranks.place.rank * -(-weight.shape[0] // ranks.place.size), weight.shape[0])
    return found


class SummedLinear(nn.Module):
    """A linear layer whose input features are split: the parts are added up, then the bias."""

    def __init__(self, linear: Any, ranks: Ranks) -> None:
        super().__init__()
        self.bias, linear.bias = linear.bias, None
        self.linear = linear
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., own inputs] to [..., outputs]."""
        out = self._ranks.sum(self.linear(x))
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer whose output features are split: the output layer, whose logits all ranks get."""

    def __init__(self, linear: nn.Module, num_outputs: int, ranks: Ranks) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = num_outputs
        self._width = -(-num_outputs // ranks.place.size)  # the last rank may have fewer
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., num_outputs]."""
        own = self.linear(x)
        own = nn.functional.pad(own, (0, self._width - own.shape[-1]))
        parts = self._ranks.gather(own)  # [ranks, ..., width]
        return parts.movedim(0, -2).flatten(-2)[..., : self.out_features]


class SummedEmbedding(nn.Module):
    """An embedding whose rows are split: each rank looks up its own, and the others add zero."""

    def __init__(self, embedding: Any, rows_before: int, ranks: Ranks) -> None:
        super().__init__()
        embedding.padding_idx = None  # it may be another rank's
        self.embedding = embedding
        self._rows_before = rows_before
        self._ranks = ranks

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows."""
        weight: torch.Tensor = self.embedding.weight
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] to [..., H]."""
        rows = token_ids - self._rows_before
        is_other = (rows < 0) | (rows >= self.weight.shape[0])
        own: torch.Tensor = self.embedding(rows.masked_fill(is_other, 0))
        return self._ranks.sum(own.masked_fill(is_other.unsqueeze(-1), 0))

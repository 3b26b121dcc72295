"""EAGLE heads on the native kernels of a CPU: a step is one pass over packed weights, a chain one call.

They compute what the modules do, in float32 but for what enters a linear layer, as the native decoder does. Chains are
drafted by :func:`engine.native.chains.draft_chains`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.layer import Rotary
from engine.native.decoder import NativeModel
from engine.native.layer_parts import LayerParts, LinearGroup
from engine.native.library import DTYPES, WEIGHT_DTYPES, NativeLibrary, load
from engine.native.linears import matrix_of
from engine.native.model_structs import CBatch, CHead, CModel, CPlan
from engine.native.packing import Packing
from engine.native.rounded import Int8Linear, is_plain
from engine.plan import BatchPlan

logger = logging.getLogger(__name__)

#: ``HeadKind`` of decoder.h.
_EAGLE: Final = 0
_EAGLE3: Final = 1

Cache = tuple[Tensor, Tensor]


class NativeHead(NativeModel):
    """An EAGLE or EAGLE-3 head on its packed weights and the caches of its layers."""

    def __init__(
        self,
        library: NativeLibrary,
        head: EagleHead | Eagle3Head,
        caches: Sequence[Cache],
        num_threads: int,
        autotune: str,
    ) -> None:
        """Pack the weights of a head that :meth:`build` found suitable. Its module runs on the packed weights too."""
        config, own_layers = head.config.layer, _layers(head)
        weight_dtype = matrix_of(head.fc).dtype
        parts = [LayerParts.of(layer) for layer in own_layers]
        fc, output = LinearGroup(head, ["fc"]), LinearGroup(head, ["lm_head"])
        packing = Packing(
            library, [fc, *(group for part in parts for group in part.groups.values()), output], num_threads
        )
        outputs = head.lm_head.out_features
        fuse = packing.linear(fc)
        layers = packing.array([packing.layer(part) for part in parts])
        lm_head = packing.linear(output)
        own = CHead(fuse=fuse, kind=_EAGLE, num_features=config.hidden_size)
        if isinstance(head, Eagle3Head):
            norms = _feature_norms(head)
            own.kind = _EAGLE3
            own.num_features = head.num_features
            own.feature_norm = packing.floats(torch.cat(norms)) if norms else None
            own.feature_parts = len(norms)
            own.embedding_norm = packing.norm(head.midlayer, "input_layernorm")
            own.state_norm = packing.norm(head.midlayer, "hidden_norm")
            own.norms_residual = head.config.norm_before_residual
            own.norms_output = head.config.norm_output
        embedding = packing.keep(head.embed_tokens.weight.detach())
        target_ids = packing.keep(_target_ids(head, outputs))
        super().__init__(
            packing,
            CModel(
                layers=layers,
                embedding=embedding.data_ptr(),
                final_norm=packing.norm(head, "norm"),
                lm_head=lm_head,
                head=ctypes.addressof(packing.keep(own)),
                target_ids=None if target_ids is None else target_ids.data_ptr(),
                num_layers=len(own_layers),
                hidden=config.hidden_size,
                intermediate=config.intermediate_size,
                vocab=head.config.vocab_size,
                outputs=outputs,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rotary_dim=config.head_dim,
                embedding_scale=1.0,
                gates_mlp=True,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
                weight_dtype=WEIGHT_DTYPES[weight_dtype],
                embedding_dtype=DTYPES[embedding.dtype],
                cache_dtype=DTYPES[caches[0][0].dtype],
                **packing.choose_prefetch(autotune),
            ),
            caches,
            partial(_rotary_tables, Rotary(config.rope, config.head_dim)),
        )
        self.num_features: int = own.num_features
        self.fused_width: int = config.hidden_size if own.kind == _EAGLE3 else own.num_features
        self.num_outputs: int = outputs
        self.hidden_size = config.hidden_size

    @classmethod
    def build(
        cls, head: nn.Module, caches: Sequence[Cache], num_threads: int, autotune: str = "cached"
    ) -> NativeHead | None:
        """A head on the native kernels, or None where there are none or the head is not one they compute.

        caches: of each layer keys and values [num_blocks, Hkv, block, D], float32 or bfloat16. The head's linear layers
        are replaced by packed ones, so it can still be run by itself; their own weights are freed one by one.
        ``autotune``: see :func:`~engine.native.autotune.choose_prefetch`.
        """
        library = load()
        if library is None:
            return None
        reason = _unknown(head, caches)
        if reason is not None:
            logger.info("the native kernels do not know this head: %s", reason)
            return None
        assert isinstance(head, EagleHead | Eagle3Head)
        with torch.inference_mode(False), torch.no_grad():
            return cls(library, head, caches, num_threads, autotune)

    def forward(
        self, token_ids: Tensor, states: Tensor, plan: BatchPlan, logit_rows: Tensor, *, are_features: bool
    ) -> tuple[Tensor, Tensor]:
        """One step of all rows; writes the cache. To the logits, float32 [N, outputs], and next states, float32 [N, H],
        of the rows ``logit_rows`` (int64 [N], ascending).

        ``token_ids`` int64 [T]; ``states`` [T, num_features] of the target, float32 or bfloat16, or the head's own of
        the step before, [T, H].

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        num_rows, num_logits = token_ids.shape[0], logit_rows.shape[0]
        logits = torch.empty(num_logits, self.num_outputs)
        stream = torch.zeros(num_logits if are_features else num_rows, -(-self.hidden_size // 64) * 64 + 32)
        batch: CBatch = self.caches_for(int(plan.positions.max()) + 1)
        batch.token_ids, batch.logit_rows, batch.num_logits = token_ids.data_ptr(), logit_rows.data_ptr(), num_logits
        batch.plan, batch.logits, batch.stream = CPlan.of(plan), logits.data_ptr(), stream.data_ptr()
        if are_features:
            states = states.contiguous()
            addresses = states.data_ptr() + torch.arange(num_rows) * states.element_size() * self.num_features
            batch.features, batch.features_dtype = addresses.data_ptr(), DTYPES[states.dtype]
        else:
            stream[:, : self.hidden_size] = states
        self.check(self.library.decoder_forward(self.address, ctypes.addressof(batch), self.num_threads))
        return logits, stream[:num_logits, : self.hidden_size]


def _layers(head: EagleHead | Eagle3Head) -> list[nn.Module]:
    return [head.midlayer, *head.layers.values()] if isinstance(head, Eagle3Head) else list(head.layers)


def _feature_norms(head: Eagle3Head) -> list[Tensor]:
    """The weights of the norms before ``fc``, each of an equal part of its input."""
    if head.config.norm_before_fc:
        return [head.input_norm.weight]
    return list(head.fc_norm.parameters()) if head.config.fc_norm else []


def _target_ids(head: EagleHead | Eagle3Head, outputs: int) -> Tensor | None:
    """int32 [outputs]: the token of each output; None where it is itself."""
    own = torch.arange(outputs)
    ids = head.to_target_ids(own)
    return None if outputs == head.config.vocab_size and torch.equal(ids, own) else ids.to(torch.int32)


def _rotary_tables(rotary: Rotary, length: int) -> tuple[Tensor, Tensor]:
    cosines, sines = rotary(torch.arange(length), torch.float32)  # [length, 1, D] each, both halves equal
    half = cosines.shape[-1] // 2
    return cosines[:, 0, :half].contiguous(), sines[:, 0, :half].contiguous()


def _unknown(  # noqa: PLR0911
    head: nn.Module, caches: Sequence[Cache]
) -> str | None:
    """Why a head is not one these kernels compute, or None."""
    if not isinstance(head, EagleHead | Eagle3Head):
        return f"it is a {type(head).__name__}"
    if isinstance(head, Eagle3Head) and not head.config.has_fc:
        return "no fc"
    linears = [module for module in head.modules() if isinstance(module, nn.Linear | Int8Linear)]
    kind, dtype = type(head.fc), matrix_of(head.fc).dtype
    for linear in linears:
        if type(linear) is not kind or not (isinstance(linear, Int8Linear) or is_plain(linear)):
            return "linear layers that are not plain"
        if matrix_of(linear).dtype != dtype:
            return "weights of several dtypes"
    if head.embed_tokens.weight.dtype not in DTYPES or head.embed_tokens.weight.device.type != "cpu":
        return f"an embedding of {head.embed_tokens.weight.dtype}"
    if isinstance(head, Eagle3Head) and head.config.norm_before_fc and head.config.fc_norm:
        return "a norm over norms before its fc"
    if head.config.layer.head_dim % 2:
        return "an odd head_dim"
    for part in (part for cache in caches for part in cache):
        if part.dtype != caches[0][0].dtype or part.dtype not in DTYPES or not part.is_contiguous():
            return f"a cache of {part.dtype}"
    ids = head.to_target_ids(torch.arange(head.lm_head.out_features))
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size or len(set(ids.tolist())) < len(ids):
        return "a draft vocabulary that names tokens twice, or none of the target's"
    return None

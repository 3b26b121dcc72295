"""From a checkpoint to an engine that has been checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

import specdec
from engine.adapters import adopt
from engine.added_embeddings import AddedEmbeddings
from engine.cuda.graphs import largest_rows, reserved_bytes, set_eager
from engine.device import resolve_device
from engine.engine import Engine
from engine.freed_memory import freed_at_once
from engine.layers import PAGED, record_layers
from engine.loading import checkpoint, refusals
from engine.loading.acceleration import choose_runner
from engine.loading.memory import LargestStep, bytes_per_slot, measure_activation, size_cache
from engine.loading.self_check import Reference
from engine.mixers import adopt_mixers, check_recorded
from engine.native import library
from engine.native.rounded import grouped_numbers, rounded_bytes
from engine.parallel import shards
from engine.parallel.ranks import Ranks
from engine.trimmed_outputs import trim_outputs
from specdec.process.cores import usable_cores
from specdec.settings import ModelSettings
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)


@freed_at_once()
def load_engine(
    settings: ModelSettings,
    join: Callable[[], Ranks] | None = None,
    largest: LargestStep = LargestStep(),
    drafted: torch.Tensor | None = None,
    *,
    reads_more: bool = False,
) -> Engine:
    """Load a checkpoint, check that it runs correctly here, and lay out the KV cache.

    Sets torch's thread count on the calling thread, which must be the one that calls :meth:`Engine.forward`. ``join``
    meets the other ranks of the model, which load at the same time; it is called before weights are read. The engine
    closes them, and so does a failure. A GPU's memory is kept for the ``largest`` step, of as many rows on all ranks.
    ``drafted``: of a draft, the ids of the tokens that it can draft, int64 [Vd], ascending; None: all. ``reads_more``:
    the engine can add to the embeddings (:attr:`Engine.added`); the model's own modules run it then.

    Raises:
        ModelNotSupported: this engine would give wrong answers for the model, or cannot run it.
        InvalidRequest: a setting does not fit the model or the machine.
        Unavailable: the other ranks do not come.
    """
    config = checkpoint.load_config(settings)
    refusals.check_config(config)
    if join is None:
        return _load(settings, config, largest, drafted=drafted, reads_more=reads_more)
    size = settings.tensor_parallel_size
    split = shards.plan_split(config, size, trust_remote_code=settings.trust_remote_code)
    ranks = join()
    try:
        return _load(settings, config, largest, ranks, split)
    except BaseException:
        ranks.close()
        raise


def _read_model(  # noqa: PLR0917
    settings: ModelSettings,
    config: PretrainedConfig,
    device: torch.device,
    split: object,
    bits: int,
    drafted: torch.Tensor | None,
) -> PreTrainedModel:
    logger.info("reading the weights of %s", settings.model)
    if drafted is None:
        return checkpoint.load_model(settings, config, device, split, bits)
    model = checkpoint.load_model(settings, config, device, split)  # its weights are rounded once it is trimmed
    trim_outputs(model, drafted)
    return model


def smaller_weights(settings: ModelSettings, config: object, dtype: torch.dtype) -> str:
    """Which options would have a CPU's kernels read fewer bytes in a step; "" where there are none."""
    is_quantised = getattr(config, "quantization_config", None) is not None
    if library.load() is None or settings.enforce_eager or is_quantised:
        return ""
    return {
        torch.float32: "--dtype bfloat16 needs half of them, --quantization int8 a quarter",
        torch.bfloat16: "--quantization int8 needs half of them",
    }.get(dtype, "")


def _load(
    settings: ModelSettings,
    config: PretrainedConfig,
    largest: LargestStep,
    ranks: Ranks | None = None,
    split: object = None,
    *,
    drafted: torch.Tensor | None = None,
    reads_more: bool = False,
) -> Engine:
    place = None if ranks is None else ranks.place
    device = resolve_device(settings.device, 0 if place is None else place.local_rank)
    num_threads = settings.num_threads or max(1, usable_cores() // (1 if place is None else place.local_size))
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    else:
        torch.cuda.set_device(device)  # of this thread: Triton launches on the current device
    set_eager(settings.enforce_eager)
    max_model_len = refusals.resolve_max_model_len(config, settings.max_model_len)
    bits = refusals.check_quantization(settings, config, device)
    model = _read_model(settings, config, device, split, bits, drafted)
    num_parameters = model.num_parameters() + grouped_numbers(model)
    if ranks is not None:
        shards.make_local(model, ranks)
    adopt(model)
    mixers = adopt_mixers(model)
    refusals.check_model(model)
    tokenizer = checkpoint.read_tokenizer(settings)
    if bits and not rounded_bytes(model):
        refusals.quantise(settings, model, bits)
    text = config.get_text_config(decoder=True)
    if ranks is not None:
        ranks.wait_for_all()
    shapes, vocab_size = record_layers(model, None if mixers else text.num_hidden_layers, device)
    check_recorded(mixers)
    refusals.check_chunks(shapes, max_model_len)

    activation_bytes = 0
    rounded = rounded_bytes(model)
    weight_bytes = model.get_memory_footprint() + rounded  # type: ignore[no-untyped-call]
    model.set_attn_implementation(PAGED)
    if device.type == "cuda" and settings.kv_cache_memory_bytes is None:
        activation_bytes = measure_activation(
            model,
            shapes,
            largest,
            block_size=settings.block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            device=device,
            mixers=mixers,
        )
        if not settings.enforce_eager:
            activation_bytes += reserved_bytes(vocab_size, device, largest_rows(largest.num_rows))
    num_blocks, num_slots, max_model_len = size_cache(
        settings,
        shapes,
        mixers,
        device=device,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        ranks=ranks,
    )
    logger.info("comparing passes with the model's own modules")
    model.set_attn_implementation("eager")
    reference = Reference(
        model,
        shapes,
        vocab_size=min(vocab_size, text.vocab_size),
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        named_length=refusals.longest_named_length(model),
        mixers=mixers,
    )
    model.set_attn_implementation(PAGED)

    engine = Engine(
        model,
        shapes,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        device=device,
        num_threads=num_threads,
        mixers=mixers,
        num_slots=num_slots,
        added=AddedEmbeddings(model) if reads_more else None,
    )
    choose_runner(engine, model, shapes, reference=reference, settings=settings, ranks=ranks, num_rows=largest.num_rows)
    if (
        device.type == "cpu"
        and not rounded
        and ranks is None
        and (hint := smaller_weights(settings, config, model.dtype))
    ):
        logger.info("%.0f MB of weights; %s and is faster here (judged by size)", weight_bytes / 1e6, hint)
    description = engine.runner.description
    engine.info = ModelInfo(
        name=os.path.basename(os.path.abspath(settings.model)),
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        tokenizer_size=tokenizer.size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        max_model_len=max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        num_parameters=num_parameters,
        eos_token_ids=checkpoint.eos_token_ids(model, tokenizer),
        kv_cache_tokens=num_blocks * settings.block_size,
        version=specdec.__version__,
        execution=description if ranks is None else f"{description}, {ranks.place.size} ranks",
        weight_bytes=(weight_bytes,) if ranks is None else tuple(ranks.gather(torch.tensor(weight_bytes)).tolist()),
        kv_cache_bytes=sum(cache.nbytes for cache in engine.all_caches) + num_slots * bytes_per_slot(mixers),
    )
    if ranks is not None:
        logger.info(
            "rank %d of %d: %.1f MiB of weights, %.1f MiB for the KV cache",
            *(ranks.place.rank, ranks.place.size, weight_bytes / 2**20, engine.info.kv_cache_bytes / 2**20),
        )
        engine.ranks = ranks
    return engine

"""Runners of a loaded model, tried one after another; each must pass the self-check before it is used."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import PreTrainedModel

from engine.attention import AttentionKernels
from engine.batch import build_batch
from engine.cuda.graphs import USUAL_ROWS, AgreedCapture, CudaCapture, GraphRunner, largest_rows
from engine.device import has_triton
from engine.engine import Engine
from engine.layers import LayerShape
from engine.loading import kernel_check
from engine.loading.self_check import Reference
from engine.native import attention, library, linears
from engine.native.decoder import NativeDecoder
from engine.native.experts import pack_experts
from engine.native.runner import NativeRunner
from engine.parallel.ranks import Ranks
from engine.runner import Runner
from engine.torch_runner import TorchRunner
from specdec.errors import ModelNotSupported, TandemError
from specdec.settings import ModelSettings

if TYPE_CHECKING:
    from engine.cuda.decoder import FusedDecoder

logger = logging.getLogger(__name__)

T = TypeVar("T")


def choose_runner(
    engine: Engine,
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    *,
    reference: Reference,
    settings: ModelSettings,
    ranks: Ranks | None,
    num_rows: int = USUAL_ROWS,
) -> None:
    """Have the engine use the fastest runner that agrees with the stock model, on all ranks the same. Passes of
    ``num_rows`` may come.

    Raises:
        ModelNotSupported: none does.
    """
    difference: str | None = None
    for runner in runners(engine, model, shapes, settings, ranks, max_rows=largest_rows(num_rows)):
        engine.use(runner)
        try:
            difference = reference.difference(engine)
        except TandemError:
            raise
        except Exception as error:  # compilers of kernels raise anything: Triton's errors derive from nothing else
            difference = f"{type(error).__name__}: {error}"
        if ranks is None:
            if difference is None:
                return
        elif ranks.agree(difference is None):
            return
        logger.warning(
            "%s: %s is not used: %s", settings.model, runner.name, difference or "it is wrong on another rank"
        )
    remedy = "; roundings may disturb it that much: try dtype float32" if model.dtype.itemsize == 2 else ""
    raise ModelNotSupported(
        f"{type(model).__name__} would give wrong answers here and is refused: fed as a ragged batch in chunks,"
        f" {difference or 'it is wrong on another rank'}{remedy}"
    )


def runners(
    engine: Engine,
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    settings: ModelSettings,
    ranks: Ranks | None,
    *,
    max_rows: int = USUAL_ROWS,
) -> Iterator[Runner]:
    """Yield the runners of an engine, the fastest first and in the same order on all ranks.

    On a CPU the model's linear layers are packed for all but the native decoder, which packs its own. With
    ``enforce_eager`` only runners of the model's own modules come, and its layers stay as they are. The native decoder
    exchanges nothing with other ranks. Graphs hold passes of up to ``max_rows``.
    """
    caches = engine.pool.block_size, engine.device
    enforce_eager, num_threads, autotune = settings.enforce_eager, engine.num_threads, settings.autotune
    is_split = ranks is not None
    graphed = partial(_with_graphs, engine, ranks=ranks, max_rows=max_rows)
    if engine.device.type == "cpu":
        if not enforce_eager:
            windows = [shape.window for shape in shapes]
            built = partial(NativeDecoder.build, model, engine.caches, windows, num_threads)
            decoder = None if is_split or engine.added else built(mixers=engine.mixers, autotune=autotune)
            if decoder is not None:
                yield NativeRunner(decoder, engine.limits)
            pack_linears(model, num_threads, autotune)
            if engine.mixers:
                pack_experts(model, num_threads)
        if (kernels := _of_all(ranks, checked("native attention", native_attention(), shapes, *caches))) is not None:
            yield engine.torch_runner("native attention", kernels)
    elif (kernels := _of_all(ranks, checked("triton attention", triton_attention(), shapes, *caches))) is not None:
        # The host plans the steps of recurrent states, which a graph would replay as they were.
        if not enforce_eager and engine.pool.states is None and engine.added is None:
            fused = fused_decoder(engine, model, shapes)
            if (fused := _of_all(ranks, fused and with_checked_attention(fused, shapes, *caches))) is not None:
                yield graphed(engine.torch_runner("fused cuda graphs", kernels, fused))
                fused.joins = False  # that runner was wrong
                yield graphed(engine.torch_runner("fused cuda graphs", kernels, fused))
            yield graphed(engine.torch_runner("cuda graphs", kernels))
        yield engine.torch_runner("triton attention", kernels)
    yield engine.torch_runner("torch attention")


def _with_graphs(engine: Engine, runner: TorchRunner, ranks: Ranks | None, max_rows: int) -> TorchRunner:
    capture = CudaCapture(engine.device)
    runner.graphs = GraphRunner(
        runner.run_modules,
        capture if ranks is None else AgreedCapture(capture, ranks.agree),
        **engine.limits,
        device=engine.device,
        max_rows=max_rows,
        forward_with_states=runner.run_modules_with_states,
        hidden_size=engine.hidden_size,
    )
    if ranks is None:  # the others run passes that they are told of
        from engine.cuda.chains import CapturedChains  # noqa: PLC0415 - there is no Triton without a GPU

        runner.captured_chains = CapturedChains(
            runner.run_modules,
            capture,
            partial(build_batch, **engine.limits),
            max_model_len=engine.limits["max_model_len"],
            block_size=engine.limits["block_size"],
            device=engine.device,
        )
    return runner


def _of_all(ranks: Ranks | None, own: T | None) -> T | None:
    """This rank's, where every rank has it."""
    return own if ranks is None or ranks.agree(own is not None) else None


def checked(
    name: str, kernels: AttentionKernels | None, shapes: Sequence[LayerShape], block_size: int, device: torch.device
) -> AttentionKernels | None:
    """The kernels, where they agree with torch for all shapes of attention; else the log says once why not."""
    if kernels is None:
        return None
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)  # the check is many small operations
    try:
        with torch.inference_mode():
            found = kernel_check.difference(kernels, shapes, block_size=block_size, device=device)
    except Exception as error:  # as above: whatever it is, torch's attention runs
        found = f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(num_threads)
    if found is None:
        return kernels
    logger.warning("%s is not used: %s", name, found)
    return None


def native_attention() -> AttentionKernels | None:
    """The native kernels for attention, where they can be compiled and loaded; else the log says why not."""
    return attention if library.load() is not None else None


def triton_attention() -> AttentionKernels | None:
    """The kernels for a GPU, where Triton is installed."""
    if not has_triton():
        logger.warning("attention on this GPU is slow: install triton")
        return None
    from engine.cuda import attention as kernels  # noqa: PLC0415 - there is no Triton without a GPU

    return kernels


def fused_decoder(engine: Engine, model: PreTrainedModel, shapes: Sequence[LayerShape]) -> FusedDecoder | None:
    """The model in few launches, where it is of a known shape; else the log says why not. There is Triton."""
    from engine.cuda import decoder  # noqa: PLC0415

    if (reason := decoder.unknown(model, engine.caches)) is not None:
        logger.info("the fused decoder does not know this model: %s", reason)
        return None
    try:
        with torch.inference_mode(False):
            return decoder.FusedDecoder(model, engine.caches, [shape.window for shape in shapes])
    except torch.OutOfMemoryError as error:
        logger.warning("the fused decoder is not used: %s", error)
        return None


def with_checked_attention(
    fused: FusedDecoder, shapes: Sequence[LayerShape], block_size: int, device: torch.device
) -> FusedDecoder | None:
    """The decoder where its attention is right, which joins parts by itself where that is, too. All its variants are
    compiled here.
    """
    from engine.cuda.rotary_attention import RotaryKernels  # noqa: PLC0415

    for joins in (True, False):
        name, kernels = "rotary attention" + " in one launch" * joins, RotaryKernels(joins=joins)
        if checked(name, kernels, shapes, block_size, device) is not None:  # type: ignore[arg-type]
            fused.joins = joins
            return fused
    return None


def pack_linears(model: PreTrainedModel, num_threads: int, autotune: str) -> None:
    """Swap a model's linear layers for packed ones that run at memory speed for few rows."""
    linears.pack_linears(model, num_threads, autotune)

"""One rank of several that serve checkpoints one after another.

``python -m tests.target_service.split_models [--graphs] FOLDER…``. Rank 0 prints a line of JSON for each checkpoint:
how far its logits are from those of one process, and which texts differ with drafts and beside other sessions.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from engine.cuda.sync import NoSync
from engine.device_thread import DeviceThread
from engine.engine import Engine, Segment
from engine.loading import acceleration
from engine.loading.load import load_engine
from engine.parallel.ranks import Place
from specdec.errors import ModelNotSupported
from specdec.settings import ModelSettings, TargetSettings
from target_service.core import TargetCore
from target_service.rank_processes import load, run_follower
from target_service.verification.verifier import Verifier
from tests.target_service.conftest import VOCAB, decode, make_prompt, make_spec
from tests.target_service.test_trees import decode_with_trees

NUM_SESSIONS = 8
NUM_TOKENS = 32


def settings_of(folder: str, size: int, rank: int = 0) -> ModelSettings:
    """Later ranks have less memory."""
    return ModelSettings(
        model=folder,
        device="cpu",
        num_threads=1,
        block_size=16,
        kv_cache_memory_bytes=2**21 - rank * 2**18,
        tensor_parallel_size=size,
        autotune="off",
    )


def logits_of(engine: Engine) -> torch.Tensor:
    """Of a prompt in two chunks, the second beside another sequence."""
    ids = list(make_prompt(1, 40))
    one, other = engine.pool.open(40), engine.pool.open(5)
    engine.forward([Segment(one, ids[:17], 0)])
    logits = engine.forward([Segment(other, ids[:5], 5), Segment(one, ids[17:], 23)])
    engine.pool.release(one)
    engine.pool.release(other)
    return logits.clone()


async def texts_of(core: TargetCore, *, drafted: bool, texts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Texts of greedy and seeded sessions; drafted ones run at once, with proposals around ``texts``."""

    async def run(seed: int) -> tuple[int, ...]:
        sampled = {} if seed % 2 else {"temperature": 0.8, "seed": seed, "rule": "coupled"}
        session = await core.open(
            make_spec(make_prompt(seed, 5 + 4 * seed), NUM_TOKENS, session_id=str(seed), **sampled)
        )
        dice = random.Random(seed)

        def draft(tokens: list[int], k: int) -> list[int]:
            return [token if dice.random() < 0.7 else dice.randrange(VOCAB) for token in texts[seed][len(tokens) :][:k]]

        if not drafted:
            text = await decode(session)
        elif seed % 4 == 1 and core.engine.pool.states is None:
            text = await decode_with_trees(session, texts[seed], seed=seed)
        else:
            text = await decode(session, k=5, draft=draft)
        await session.close()
        return text

    if not drafted:
        return [await run(seed) for seed in range(NUM_SESSIONS)]
    return list(await asyncio.gather(*(run(seed) for seed in range(NUM_SESSIONS))))


class Rerun:
    """Stands in for a capture on a CPU. On a later rank every fourth fails, so no rank has that one."""

    has_room = True

    def __init__(self, rank: int) -> None:
        self._rank, self._count = rank, 0

    def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
        self._count += 1
        with NoSync("cpu"):
            run()
        if self._rank and self._count % 4 == 0:
            raise RuntimeError("it cannot be captured")
        return run


def use_graphs(place: Place) -> None:
    """Have split models replay passes, as they do on GPUs."""
    original = acceleration.runners

    def runners(
        engine: Engine, model: Any, shapes: Any, settings: ModelSettings, ranks: Any, **_: Any
    ) -> Iterator[Any]:
        if ranks is None:
            yield from original(engine, model, shapes, settings, ranks)
        kernels = acceleration.native_attention()
        yield acceleration._with_graphs(engine, engine.torch_runner("cuda graphs", kernels), ranks)  # noqa: SLF001

    acceleration.CudaCapture = lambda device: Rerun(place.rank)  # type: ignore[assignment,misc]
    acceleration.runners = runners


async def examine(folder: str, place: Place) -> dict[str, Any]:
    single = load_engine(settings_of(folder, 1))
    wanted = logits_of(single)
    settings = settings_of(folder, place.size)
    device = DeviceThread()
    try:
        engine = await device.run(load, settings, place)
    except ModelNotSupported as error:
        return {"refused": str(error)}
    await device.run(engine.warm_up)
    logits = await device.run(logits_of, engine)
    num_kv_heads = engine.caches[0][0].shape[1]
    core = TargetCore(engine, device, TargetSettings(model=settings), Verifier(num_threads=engine.num_threads))
    try:
        plain = await texts_of(core, drafted=False, texts=[])
        drafted = await texts_of(core, drafted=True, texts=plain)
    finally:
        graphs = getattr(engine.runner, "graphs", None)
        await core.close()
    return {
        "difference": float((logits - wanted).abs().max()),
        "kv_heads": num_kv_heads,
        "changed": [seed for seed in range(NUM_SESSIONS) if plain[seed] != drafted[seed]],
        "distinct": len(set(plain)),
        "weight_bytes": engine.info.weight_bytes,
        "kv_cache_bytes": engine.info.kv_cache_bytes,
        "captured": 0 if graphs is None else len(graphs.buckets),
    }


def main(folders: list[str]) -> None:
    transformers_logging.disable_progress_bar()
    place = Place.of(os.environ, int(os.environ["WORLD_SIZE"]))
    assert place is not None
    dist.init_process_group("gloo")
    if folders[0] == "--graphs":
        del folders[0]
        use_graphs(place)
    for folder in folders:
        if place.rank:
            run_follower(settings_of(folder, place.size, place.rank), place, log_level="error", log_format="text")
        else:
            print(json.dumps({"model": os.path.basename(folder), **asyncio.run(examine(folder, place))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

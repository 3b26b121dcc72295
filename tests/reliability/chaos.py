"""``python -m tests.reliability.chaos``: services and links are hurt at random under ten streams, and nothing is lost.

Every finished text equals the undisturbed one, every other one is its beginning and ends with a clear error, nothing
hangs, no process grows in a life of a minute and a half or more, and in the end no service holds a session or a KV
block. The faults are a function of ``--seed``.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.e2e.conftest import PROMPTS
from tests.e2e.servers import draft_process, fake_draft, fake_target, target_process
from tests.reliability.faults import Disturbance, faults_of
from tests.reliability.load import Load, questions
from tests.reliability.rig import BLOCK_BYTES, FEW_BLOCKS, Rig
from tests.reliability.sizes import Sizes

NUM_STREAMS = 10
#: Samples of a life, one a second, that show whether it grows.
MIN_SAMPLES = 90


async def cause_chaos(
    make: Callable[[random.Random, Path], Rig],
    *,
    seed: int,
    seconds: float,
    num_tokens: int,
    folder: Path,
    num_faults: int = 1,
) -> str:
    """Hurt the services of a rig for so long; a line of figures. Raises AssertionError where something was lost.

    ``num_faults``: faults at least, for which it may take longer. ``folder`` is empty and takes certificates.
    """
    rng = random.Random(seed)
    rig = make(rng, folder)
    try:
        await rig.start("--draft-timeout-s", "0.5")
        load = Load(rig, questions(PROMPTS, num_tokens), rng)
        await load.learn()
        await rig.wait_until_free()
        disturbance = Disturbance(faults_of(rig, rng), rng)
        started = time.monotonic()
        lives: dict[tuple[str, int], Sizes] = defaultdict(Sizes)
        sampling = asyncio.create_task(_sample(rig, lives))
        async with disturbance.running():
            await load.run(seconds, NUM_STREAMS)
            while disturbance.counts.total() < num_faults and not load.outcomes.wrong:
                await load.run(1.0, NUM_STREAMS)
        assert not sampling.done(), sampling.exception()
        sampling.cancel()
        took_s = time.monotonic() - started
        await rig.recover()
        await load.check_all()
        await rig.wait_until_free()
        assert not load.outcomes.wrong, "\n".join(load.outcomes.wrong)
        assert not rig.tracebacks(), "\n".join(rig.tracebacks())
        long = [(name, sizes) for (name, _), sizes in lives.items() if len(sizes.rss) >= MIN_SAMPLES]
        sizes = "; ".join(f"{name} for {len(each.rss)} s: {each.describe()}" for name, each in long)
        assert all(each.is_flat for _, each in long), sizes
        num_preemptions = sum([(await rig.load_of(name)).preemptions for name in rig.targets])
        num_cached = await rig.metric("tandem_cached_prompt_tokens_total")
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(disturbance.counts.items()))
        return (
            f"{disturbance.counts.total()} faults in {took_s:.0f} s ({counts}); {load.outcomes.describe()};"
            f" {num_preemptions} preemptions in the targets' last lives; {num_cached:.0f} prompt tokens reused in the"
            f" gateway's last life; {sizes or 'no long life'}"
        )
    finally:
        await rig.close()


async def _sample(rig: Rig, lives: dict[tuple[str, int], Sizes]) -> None:
    while True:
        await asyncio.sleep(1.0)
        for name, process in rig.processes.items():
            with suppress(psutil.Error):  # it was killed
                lives[name, process.pid].add(*rig.size_of(process))


def toys(rng: random.Random, folder: Path) -> Rig:
    """Toy engines behind the real gateway, servicers and mutual TLS: they are back within a second."""
    return Rig([fake_target(), fake_target()], [fake_draft(), fake_draft()], rng, certificates=folder)


def bundled_pair(rng: random.Random, folder: Path) -> Rig:
    """The real engines, without TLS; the targets have blocks for three of the ten streams."""
    few = ("--kv-cache-memory-bytes", str(FEW_BLOCKS * BLOCK_BYTES))
    return Rig([target_process(*few), target_process(*few)], [draft_process()], rng)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="for each of the two kinds of services")
    parser.add_argument("--real", action="store_true", help="the bundled pair only")
    args = parser.parse_args()
    for make, num_tokens in ((toys, 300), (bundled_pair, 120))[args.real :]:
        with tempfile.TemporaryDirectory() as folder:
            chaos = cause_chaos(make, seed=args.seed, seconds=args.seconds, num_tokens=num_tokens, folder=Path(folder))
            report = asyncio.run(chaos)
        print(f"{make.__name__}, seed {args.seed}: {report}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

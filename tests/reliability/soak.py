"""``python -m tests.reliability.soak``: a mixed load with clients that leave, for as long as wanted; nothing may grow.

Memory and file descriptors of every process are sampled. They are flat if the last third of the time needs no more than
the second (:mod:`tests.reliability.sizes` has the bounds). Every text is compared, and in the end nothing is held.
"""

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter, defaultdict

import httpx

from tests.e2e.conftest import PROMPTS
from tests.e2e.servers import draft_process, fake_draft, fake_target, target_process
from tests.reliability.load import Load, questions
from tests.reliability.rig import BLOCK_BYTES, FEW_BLOCKS, Rig
from tests.reliability.sizes import Sizes

NUM_STREAMS = 6
NUM_SAMPLES = 60
#: Kinds of requests whose text is not compared; the load that is compared runs beside them. A status of 400 is wanted
#: where there is one.
MIXED = (
    ("completions", {"prompt": "x = ", "max_tokens": 24, "n": 3, "logprobs": 2}, 200),
    ("completions", {"prompt": "import ", "max_tokens": 40, "stop": ["\n", "def"], "temperature": 0.7}, 200),
    ("completions", {"prompt": "def f(", "max_tokens": 40, "session_id": "a"}, 200),
    ("completions", {"prompt": "def f(a, b):\n" * 40, "max_tokens": 8, "prompt_logprobs": 1}, 200),
    ("completions", {"prompt": "x", "max_tokens": 10**9}, 400),
    ("completions", {"prompt": "x", "temperature": -1}, 400),
    ("completions", {"prompt": [-1]}, 400),
    ("chat/completions", {"messages": "hello"}, 400),
)


async def soak(rig: Rig, *, seconds: float, seed: int, num_tokens: int) -> str:
    """Load a rig for so long; a line of figures. Raises AssertionError where something grew or was wrong."""
    rng = random.Random(seed)
    samples: dict[str, Sizes] = defaultdict(Sizes)
    try:
        await rig.start()
        load = Load(rig, questions(PROMPTS, num_tokens), rng, cancelled_share=0.3)
        await load.learn()
        mixed: Counter[int] = Counter()
        sampling = asyncio.create_task(_sample(rig, samples, seconds / NUM_SAMPLES))
        try:
            await asyncio.gather(load.run(seconds, NUM_STREAMS), _mix(rig, mixed, rng, seconds))
        finally:
            sampling.cancel()
        await load.check_all()
        await rig.wait_until_free()
        outcomes = load.outcomes
        assert not outcomes.wrong, "\n".join(outcomes.wrong)
        assert not outcomes.unfinished, outcomes.unfinished
        assert not rig.tracebacks(), "\n".join(rig.tracebacks())
        num_preemptions = sum([(await rig.load_of(name)).preemptions for name in rig.targets])
        sizes = "; ".join(f"{name} {sizes.describe()}" for name, sizes in samples.items())
        assert all(each.is_flat for each in samples.values()), sizes
        mixed_counts = f"{num_preemptions} preemptions; {mixed.total()} mixed requests {dict(mixed)}"
        return f"{seconds:.0f} s, {outcomes.describe()}; {mixed_counts}; {sizes}"
    finally:
        await rig.close()


async def _mix(rig: Rig, counts: Counter[int], rng: random.Random, seconds: float) -> None:
    """One request of another kind after the other."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=f"{rig.base_url}/v1/", timeout=60) as client:
        while time.monotonic() < end:
            path, body, wanted = rng.choice(MIXED)
            answer = await client.post(path, json=body)
            assert answer.status_code == wanted, f"{path} {body}: {answer.status_code} {answer.text}"
            counts[answer.status_code] += 1


async def _sample(rig: Rig, samples: dict[str, Sizes], pause_s: float) -> None:
    while True:
        await asyncio.sleep(pause_s)
        gc.collect()  # calls that this client left hold their connections, on both sides
        for name, (rss, fds) in rig.sizes().items():
            samples[name].add(rss, fds)


def toys() -> Rig:
    return Rig([fake_target()], [fake_draft()], random.Random(0))


def bundled_pair() -> Rig:
    """The real engines; the target has blocks for half of the streams, so they are preempted all the time."""
    few = ("--kv-cache-memory-bytes", str(FEW_BLOCKS * BLOCK_BYTES))
    return Rig([target_process(*few)], [draft_process(*few)], random.Random(0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(asyncio.run(soak(bundled_pair(), seconds=args.seconds, seed=args.seed, num_tokens=120)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.checkpoints import TARGET, find_checkpoint
from tandem.padding import pad_checkpoint

#: Loads a small model, which brings what every process needs, then a larger one, and reads its memory meanwhile.
PROGRAM = """
import ctypes, json, pathlib, sys, threading, time
import torch
from engine.loading.load import load_engine
from specdec.settings import ModelSettings

def own_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

def load(model):
    return load_engine(ModelSettings(model=model, device="cpu", dtype=sys.argv[3], quantization=sys.argv[4],
                                     num_threads=1, kv_cache_memory_bytes=2**24, max_model_len=256,
                                     autotune="off"))

def watch():
    while not done:
        seen.append(own_bytes())
        time.sleep(0.002)

load(sys.argv[1])
ctypes.CDLL(None).malloc_trim(0)
before, seen, done = own_bytes(), [], []
watcher = threading.Thread(target=watch)
watcher.start()
engine = load(sys.argv[2])
done.append(True)
watcher.join()
info = engine.info
print(json.dumps([max(seen) - before - info.kv_cache_bytes, info.weight_bytes[0]]))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quantization", "smallest"), [("int8", 1.8e8), ("int4", 1.1e8)])
def test_rounding_at_load_takes_little_more_than_the_result(
    tmp_path: Path, quantization: str, smallest: float, dtype: str
) -> None:
    target = find_checkpoint(TARGET)
    padded = pad_checkpoint(target, 200_000_000, cache=tmp_path)
    command = [sys.executable, "-c", PROGRAM, target, padded, dtype, quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    peak, weights = json.loads(done.stdout.splitlines()[-1])
    assert weights > smallest
    assert 0.9 * weights < peak <= 1.15 * weights

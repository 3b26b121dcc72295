"""The program of ``benchmarks.vllm_draft`` inside vLLM's own environment: one JSON line per generated batch."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams


def main() -> None:
    """``argv[1]``: ``engine`` (arguments of ``LLM``), ``prompts``, ``num_tokens`` and ``batches`` of prompt numbers."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    llm = LLM(**job["engine"], disable_log_stats=False, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["num_tokens"], ignore_eos=True)

    def generate(prompts: list[str]) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)]

    def counts() -> dict[str, float]:
        found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        names = {"accepted": "vllm:spec_decode_num_accepted_tokens", "drafted": "vllm:spec_decode_num_draft_tokens"}
        return {name: found.get(metric, 0) for name, metric in names.items()}

    generate(job["prompts"][:1])
    for batch in job["batches"]:
        before, start = counts(), time.perf_counter()
        texts = generate([job["prompts"][index] for index in batch])
        seconds = time.perf_counter() - start
        spent = {name: value - before[name] for name, value in counts().items()}
        print(json.dumps({"batch": batch, "texts": texts, "seconds": seconds, **spent}), flush=True)


main()

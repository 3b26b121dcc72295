"""OpenVINO GenAI in this process: plain, with a draft model, and with prompt lookup, alternating on the same prompts.

``python openvino_generate.py TARGET DRAFT PROMPTS``: two folders written by ``optimum-cli export openvino``, and lines
of JSON with ``prompt``. Prints the median tokens per second of each mode, prefill included, as ``tandem bench`` does.
It needs OpenVINO GenAI alone, so it runs in an environment of its own.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import openvino_genai as ov  # type: ignore[import-not-found]

#: Batches before those that count.
NUM_WARM_UP = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens a round")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=1, help="prompts of a batch")
    args = parser.parse_args()
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    options = {"INFERENCE_PRECISION_HINT": "f32"}  # by default the CPU plugin computes in bfloat16 where it can
    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    modes = {
        "plain": ({}, {}),
        "draft model": (
            {"draft_model": ov.draft_model(args.draft, "CPU", **options)},
            {"num_assistant_tokens": args.k},
        ),
        "prompt lookup": ({"prompt_lookup": True}, {"num_assistant_tokens": args.k, "max_ngram_size": 3}),
    }
    pipelines = {
        mode: ov.LLMPipeline(args.target, "CPU", scheduler_config=scheduler, **given, **options)
        for mode, (given, _) in modes.items()
    }
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    batches = [prompts[start : start + args.sessions] for start in range(0, len(prompts), args.sessions)]
    batches = [batch for batch in batches if len(batch) == args.sessions]
    for number, batch in enumerate([*batches[:NUM_WARM_UP], *batches]):
        for mode, (_, given) in modes.items():
            config = ov.GenerationConfig(max_new_tokens=args.max_tokens, ignore_eos=True, do_sample=False, **given)
            begun = time.perf_counter()
            result = pipelines[mode].generate(batch, config)
            seconds = time.perf_counter() - begun
            if number >= NUM_WARM_UP:
                rates[mode].append(result.perf_metrics.get_num_generated_tokens() / seconds)
    for mode, values in rates.items():
        paired = [value / plain for value, plain in zip(values, rates["plain"], strict=True)]
        print(f"{mode:14} {statistics.median(values):8.1f} tokens/s {statistics.median(paired):6.2f} over plain")


if __name__ == "__main__":
    main()

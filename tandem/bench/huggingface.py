"""Hugging Face ``generate`` on the same prompts, in a process of its own with its own defaults.

``python -m tandem.bench.huggingface`` reads one JSON object a line and answers each with one: first the models, then
runs ``{"mode": …, "prompts": [[…]], "max_tokens": …}`` answered by ``{"seconds": …}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from specdec.errors import Unavailable
from tandem.launcher.environment import SHORT_SPIN

#: Mode → the arguments of ``generate`` it adds (the assistant model is put in where it is named).
MODES: Final[Mapping[str, str]] = {
    "HF generate": "",
    "HF assistant_model": "assistant_model",
    "HF prompt_lookup": "prompt_lookup_num_tokens",
}


class HuggingFace:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process, *, assists: bool) -> None:
        self._process = process
        self._assists = assists

    @classmethod
    async def start(cls, models: Mapping[str, Any]) -> Self:
        """Load the models.

        The mapping holds ``target``, ``draft`` (or None), ``dtype``, ``device``, ``threads``, ``k``, ``temperature``.
        """
        # Its threads wait as they do out of the box; what suits two services on one machine would not be fair to it.
        environment = {name: value for name, value in os.environ.items() if name not in SHORT_SPIN}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem.launcher.child", str(os.getpid()), "tandem.bench.huggingface"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**environment, "TQDM_DISABLE": "1"},
        )
        self = cls(process, assists=models["draft"] is not None)
        try:
            await self._ask(models)
        except BaseException:
            await self.close()
            raise
        return self

    def modes(self, num_sessions: int) -> list[str]:
        """The modes that can be run: it speculates for one sequence at a time only, and assists with a model only."""
        chosen = [mode for mode, extra in MODES.items() if num_sessions == 1 or not extra]
        return [mode for mode in chosen if self._assists or MODES[mode] != "assistant_model"]

    async def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds to continue all prompts, as one batch, by exactly ``max_tokens`` tokens each."""
        listed = [list(prompt) for prompt in prompts]
        answer = await self._ask({"mode": mode, "prompts": listed, "max_tokens": max_tokens})
        return float(answer["seconds"])

    async def close(self) -> None:
        """End the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _ask(self, message: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise Unavailable(f"Hugging Face: {answer['error']}")
        return answer


class _Generator:
    """What the other process does."""

    def __init__(
        self, *, target: str, draft: str | None, dtype: str, device: str, threads: int, k: int, temperature: float
    ) -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        torch.set_num_threads(threads)
        kind = "auto" if dtype == "auto" else getattr(torch, dtype)
        self._torch = torch
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device

        def load(folder: str) -> Any:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
            return model.to(self._device)

        self._target = load(target)
        self._draft: Any = None
        self._target.generation_config.eos_token_id = None
        if draft is not None:
            self._draft = load(draft)
            self._draft.generation_config.num_assistant_tokens = k
            self._draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._draft.generation_config.assistant_confidence_threshold = 0.0
            self._draft.generation_config.eos_token_id = None
        self._sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self._extras = {"assistant_model": self._draft, "prompt_lookup_num_tokens": k}

    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds of one ``generate``."""
        name = MODES[mode]
        extra = {name: self._extras[name]} if name else {}
        width = max(map(len, prompts))
        ids = self._torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts])  # [B, W], padded left
        mask = self._torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        started = time.perf_counter()
        with self._torch.inference_mode():
            out = self._target.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=max_tokens,
                pad_token_id=0,
                **self._sampling,
                **extra,
            ).cpu()
        seconds = time.perf_counter() - started
        if out.shape[1] != ids.shape[1] + max_tokens:
            raise RuntimeError(f"{mode} made {out.shape[1] - ids.shape[1]} tokens, not {max_tokens}")
        return seconds


def main() -> None:
    """Answer requests until standard input ends."""
    worker = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if worker is None:
                worker = _Generator(**message)
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = {"seconds": worker.run(**message)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

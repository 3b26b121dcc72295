"""One draft service for gateways of different targets whose vocabulary is the same."""

import asyncio
from contextlib import AsyncExitStack, aclosing

from draft_service.core import DraftCore
from gateway.decoding.context import DecodingContext
from gateway.decoding.loop import Decoding
from gateway.decoding.request import DecodingRequest
from gateway.placement.routing import Router
from specdec.params import SamplingParams
from specdec.settings import DraftSettings, GatewaySettings, ModelSettings, SpeculativeSettings, TargetSettings
from target_service.core import TargetCore
from tests.llamas import build_llama, greedy_text

NUM_TOKENS = 200


def settings_of(folder):
    return ModelSettings(model=str(folder), device="cpu", dtype="float32", num_threads=1, kv_cache_memory_bytes=8 << 20)


async def run(context, prompt):
    """The text of a session that parks, and its metrics."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=0)
    # Both gateways have a session of this name.
    decoding = Decoding(
        context, DecodingRequest(prompt=prompt, params=params, num_speculative_tokens=4, session_id=f"chat {prompt[0]}")
    )
    text = []
    async with aclosing(decoding.verdicts()) as verdicts:
        async for verdict in verdicts:
            text += verdict.token_ids
    return text, decoding.metrics


async def test_each_target_writes_its_own_text_with_the_same_draft(tmp_path):
    models = [build_llama(seed=seed, vocab_size=64, max_position_embeddings=256) for seed in (1, 2)]
    async with AsyncExitStack() as stack:
        targets = []
        for index, model in enumerate(models):
            model.save_pretrained(tmp_path / str(index))
            targets.append(await TargetCore.start(TargetSettings(model=settings_of(tmp_path / str(index)))))
            stack.push_async_callback(targets[-1].close)
        first = tmp_path / "0"
        draft = await DraftCore.start(
            DraftSettings(speculative=SpeculativeSettings(model=str(first)), model=settings_of(first))
        )
        stack.push_async_callback(draft.close)
        contexts = [
            DecodingContext(await Router.local(target, draft), GatewaySettings(fixed_draft_length=True))
            for target in targets
        ]
        prompts = [(5, 6, 7), (8, 9, 10)]
        texts = [[greedy_text(model, prompt, NUM_TOKENS) for model in models] for prompt in prompts]
        for _ in range(2):  # the second time with what the first one has left
            done = await asyncio.gather(*(run(context, prompt) for prompt in prompts for context in contexts))
            assert [text for text, _ in done] == [text for pair in texts for text in pair]
            drafted, accepted = [0, 0], [0, 0]
            for number, (_, metrics) in enumerate(done):
                drafted[number % 2] += metrics.num_draft_tokens
                accepted[number % 2] += metrics.num_accepted_draft_tokens
            # The draft is the first target's own model.
            assert min(drafted) > 0
            assert accepted[0] / drafted[0] > 0.9 > accepted[1] / drafted[1]

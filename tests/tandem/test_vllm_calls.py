"""Programs for vLLM: the imports, arguments and methods they use, each honoured, or refused by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm.auto import tqdm

from specdec.errors import InvalidRequest
from specdec.params import SamplingParams as Params
from tandem import LLM, SamplingParams
from tandem.checkpoints import MODELS
from tandem.inputs import TextPrompt, TokensPrompt
from tandem.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from tandem.sampling_params import SamplingParams as SameParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ["def main(argv):\n    ", "for i in range("]

GIVEN: dict[str, Any] = {
    "revision": None, "tokenizer_mode": "auto", "load_format": "auto", "tensor_parallel_size": 1, "hf_token": None,
    "enforce_eager": False, "gpu_memory_utilization": 0.9, "skip_tokenizer_init": False, "cpu_offload_gb": 0,
    "kv_cache_dtype": "auto", "quantization": None, "seed": 0, "max_model_len": 512, "trust_remote_code": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("python-1m") as made:
        yield made


def test_arguments_that_ask_for_what_is_so_anyway_are_silent() -> None:
    with LLM(Path(MODELS / "python-1m"), **GIVEN) as made:  # warnings are errors here
        assert made.generate("def f(", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prefix_match_unit": 16}, "prefix_match_unit=16: no effect here: prompts are compared token by token"),
        ({"tool_call_parser": "hermes"}, "tool_call_parser='hermes': no effect here: how calls of tools"),
    ],
)
def test_arguments_without_effect_warn(given: dict[str, Any], text: str) -> None:
    with pytest.warns(UserWarning, match=text), LLM(str(MODELS / "python-1m"), **given):
        pass


def test_options_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(MODELS / "python-1m"), gpu_memory_utilization=0.5, device="cpu"):
        assert "gpu_memory_utilization: no effect here: the model runs on" in caplog.text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"revision": "v1"}, "revision='v1' is not supported"),
        ({"enable_lora": True}, "enable_lora=True is not supported; only the base model"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not supported"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides={'a': 1} is not supported; change the config.json"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LLM(str(MODELS / "python-1m"), **given)
    assert text in str(caught.value)


def test_calls_take_the_arguments_of_vllm_that_ask_for_nothing(llm: LLM) -> None:
    prompts = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=[5, 6, 7])]
    made: list[int] = []

    def bar(*args: Any, **given: Any) -> tqdm:  # type: ignore[type-arg]
        made.append(given["total"])
        return tqdm(*args, **given, disable=True)

    outputs = llm.generate(prompts, GREEDY, use_tqdm=bar, lora_request=None, priority=None, tokenization_kwargs=None)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    assert made == [2]
    with pytest.warns(UserWarning, match="priority: no effect"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, priority=[1])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda it: it.generate("x", lora_request=object()), "is not supported; only the base model"),
        (lambda it: it.generate("x", prompt_adapter=1), "no argument 'prompt_adapter' is known; did you mean"),
        (lambda it: it.chat([{"role": "user", "content": "x"}], continue_final_message=True), "use generate"),
        (lambda it: it.generate({"prompt": "x", "multi_modal_data": {"image": 1}}), "'multi_modal_data'"),
    ],
)
def test_calls_refuse_what_they_cannot_honour(llm: LLM, call: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(llm)
    assert text in str(caught.value)


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(PROMPTS[0])
    assert ids == llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].prompt_token_ids
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("method", ["beam_search", "encode", "embed", "score", "sleep", "collective_rpc", "llm_engine"])
def test_methods_that_are_not_here_say_why(llm: LLM, method: str) -> None:
    assert not hasattr(llm, method)
    with pytest.raises(AttributeError, match=rf"LLM has no {method}: \w+"):
        getattr(llm, method)


def test_sampling_params_take_none_and_what_asks_for_nothing() -> None:
    given = dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "extra_args"))
    params = SamplingParams(**given, best_of=1, use_beam_search=False, max_tokens=None, temperature=0)
    assert params.max_tokens is None
    assert (params.stop, params.logit_bias, params.allowed_token_ids) == ((), {}, ())
    assert isinstance(params, Params)
    assert SameParams is SamplingParams
    assert params.clone() == params
    assert repr(params).startswith("SamplingParams(n=1")
    assert SamplingParams.from_optional(
        n=None, guided_decoding=GuidedDecodingParams(regex="a+")
    ).structured_outputs == (StructuredOutputsParams(regex="a+"))
    with pytest.warns(UserWarning, match="length_penalty of SamplingParams has no effect"):
        SamplingParams(length_penalty=1.0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"best_of": 3}, "best_of=3 is not supported; sample n texts"),
        ({"use_beam_search": True}, "use_beam_search=True is not supported"),
        ({"logits_processors": [print]}, "use logit_bias"),
        ({"temprature": 0}, "SamplingParams has no argument 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_sampling_params_refuse_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**given)
    assert text in str(caught.value)

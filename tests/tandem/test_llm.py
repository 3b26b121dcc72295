"""The offline API on the bundled pair."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_service.core import DraftCore
from specdec.errors import InvalidRequest, ModelNotSupported
from tandem import LLM, SamplingParams
from tandem.checkpoints import MODELS
from target_service.core import TargetCore
from tests.draft_first import draft_first

TARGET, DRAFT = str(MODELS / "python-12m"), str(MODELS / "python-1m")
PROMPTS = [
    "def main(argv):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self",
    "for i in range(",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"model": DRAFT, "num_speculative_tokens": 4}
    with pytest.MonkeyPatch.context() as patch:
        draft_first(TargetCore, DraftCore, patch.setattr)
        with LLM(TARGET, dtype="float32", speculative_config=config, fixed_draft_length=True) as made:
            yield made


def token_ids(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_prompt_that_was_computed_is_not_computed_again(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(300, 440))}
    first, second = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 139), "the last token is fed in any case"
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_documented_example(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(
        model="python-12m",
        tensor_parallel_size=1,
        speculative_config={
            "model": "python-1m",
            "num_speculative_tokens": 5,
        },
    )
    outputs = llm.generate(prompts, sampling_params)

    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    llm.close()
    assert "Prompt: 'The future of AI is', Generated text: " in capsys.readouterr().out


def test_greedy_is_what_transformers_generates(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            expected.append(model.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :].tolist())
    assert token_ids(llm, GREEDY) == expected


def test_results_have_vllms_shape(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=True)
    assert [output.prompt for output in outputs] == PROMPTS
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert output.prompt_logprobs is completion.logprobs is completion.cumulative_logprob is None
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert completion.text
        assert len(completion.token_ids) == 32
        metrics = output.metrics
        assert metrics is not None
        assert metrics.num_drafts > 0
        assert metrics.num_draft_tokens >= metrics.num_accepted_tokens == sum(metrics.num_accepted_tokens_per_pos)
        assert 1 <= metrics.mean_acceptance_length <= 5
        assert 0 <= metrics.draft_acceptance_rate <= 1
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].prompt_token_ids
    expected = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    forms = [ids, [ids], {"prompt": PROMPTS[0]}, [{"prompt_token_ids": ids}], [PROMPTS[0]]]
    for form in forms:
        output = llm.generate(form, GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == ids
    assert llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY)[0].prompt is None
    assert llm.generate([], GREEDY) == []


def test_one_sampling_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 5, 9)]
    assert [len(ids) for ids in token_ids(llm, params)] == [1, 5, 9]  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="3 prompts came with 1"):
        llm.generate(PROMPTS, [GREEDY])


def test_samples_logprobs_and_stops(llm: LLM) -> None:
    output = llm.generate(PROMPTS[0], SamplingParams(n=3, seed=1, max_tokens=8, logprobs=2), use_tqdm=False)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    first = output.outputs[0]
    assert first.logprobs is not None
    assert first.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True))
    )
    assert all(len(entry) in (2, 3) for entry in first.logprobs)
    text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[10:14]
    stopped = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=32, stop=[stop]), use_tqdm=False)
    assert stopped[0].outputs[0].text == text[: text.index(stop)]
    assert (stopped[0].outputs[0].finish_reason, stopped[0].outputs[0].stop_reason) == ("stop", stop)


def test_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_seeded_text_does_not_depend_on_speculation(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=32)
    expected = token_ids(llm, params)
    assert expected == token_ids(llm, params)
    assert expected != token_ids(llm, SamplingParams(seed=8, max_tokens=32))
    for arguments in (
        {},
        {"speculative_model": DRAFT, "num_speculative_tokens": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
    ):
        with LLM(TARGET, dtype="float32", **arguments) as other:
            assert token_ids(other, params) == expected


def test_many_more_prompts_than_places() -> None:
    with LLM(TARGET, speculative_config={"model": DRAFT}, max_num_seqs=2) as llm:
        outputs = llm.generate([f"x = {i}" for i in range(9)], SamplingParams(max_tokens=4), use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"x = {i}" for i in range(9)]


def test_predictions() -> None:
    """They change the speed, never the text; there is one for each prompt."""
    lookup = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM(TARGET, dtype="float32", speculative_config=lookup, fixed_draft_length=True) as llm:
        texts = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        right = llm.generate(PROMPTS, GREEDY, use_tqdm=False, predictions=texts)
        wrong = llm.generate(PROMPTS, GREEDY, use_tqdm=False, predictions=["nothing like it"] * 3)
        for outputs in (right, wrong):
            assert [output.outputs[0].text for output in outputs] == texts
        assert all(output.metrics and output.metrics.num_accepted_tokens >= 20 for output in right)
        with pytest.raises(InvalidRequest, match="a text for each of 3"):
            llm.generate(PROMPTS, GREEDY, predictions=texts[:2])
        conversation = [{"role": "user", "content": "Write a function."}]
        [plain] = llm.chat(conversation, GREEDY, use_tqdm=False)
        [predicted] = llm.chat(conversation, GREEDY, use_tqdm=False, predictions=[plain.outputs[0].text])
        assert predicted.outputs[0].text == plain.outputs[0].text


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Write a function."}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert one[0].prompt is not None
    assert one[0].prompt.startswith("<|user|>")
    assert one[0].prompt.count("<|endoftext|>") == 0
    assert [output.outputs[0].text for output in two] == [one[0].outputs[0].text] * 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "Write a function."}]}]
    assert llm.chat(parts, GREEDY, use_tqdm=False)[0].prompt == one[0].prompt


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("method", "given", "params", "message"),
    [
        ("generate", 5, GREEDY, "prompts is 5; give a prompt or a list of them"),
        ("generate", "x", {"max_tokens": 3}, "sampling_params is {'max_tokens': 3}; give SamplingParams"),
        ("generate", ["x"], [{"max_tokens": 3}], "give SamplingParams, or a list of them"),
        ("chat", "hi", GREEDY, "messages holds 'hi'; a conversation is a list of"),
        ("chat", [5], GREEDY, "messages holds 5; a conversation is a list of"),
        ("chat", [{"content": "hi"}], GREEDY, "a conversation is a list of"),
        ("chat", [IMAGE], GREEDY, "part of type 'image_url'; this server reads parts of type 'text' only"),
        ("stream_chat", "hi", GREEDY, "messages holds 'hi'"),
    ],
)
def test_values_of_a_wrong_type_are_named(llm: LLM, method: str, given: object, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        list(getattr(llm, method)(given, params))


def test_chat_templates_get_their_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM("python-12m", chat_template="{{ mode }}{{ messages[0].content }}", dtype="float32") as llm:
        output = llm.chat(
            [{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, chat_template_kwargs={"mode": "def "}
        )
    assert output[0].prompt == "def x"


def test_errors_propagate_and_the_object_lives_on(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 5000"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=5000), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.generate([[1, 2], [99999]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        llm.generate({"text": "x"}, GREEDY)
    assert len(token_ids(llm, GREEDY)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modle": "x"}, "no argument 'modle'"),
        ({"max_modle_len": 3}, "did you mean 'max_model_len'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be in"),
        ({"verification": "hope"}, "verification is 'hope'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"speculative_config": {"modle": "x"}}, "modle"),
        ({"model": "nowhere"}, "does not exist"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LLM(**arguments)


def test_a_checkpoint_that_cannot_be_a_draft(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    safetensors.numpy.save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match="different vocabularies"):
        LLM(TARGET, speculative_config={"model": str(tmp_path)})


def test_a_fork_says_that_it_has_only_a_copy(llm: LLM) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # it waited forever
        try:
            llm.generate("x", GREEDY, use_tqdm=False)
        except InvalidRequest as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert f"a fork's copy of that in process {os.getpid()}; make a new one here" in os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(pid, 0)


def test_use_after_close_is_an_error() -> None:
    llm = LLM(TARGET)
    streams = [llm.stream("x", SamplingParams(max_tokens=500, ignore_eos=True)) for _ in range(2)]
    for stream in streams:
        assert next(stream).token_ids
    llm.close()
    llm.close()
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("x")
    with pytest.raises(InvalidRequest, match="closed"):
        next(streams[0])
    streams[1].close()


INTERRUPTED = """
import os, signal, threading
from tandem import LLM, SamplingParams
llm = LLM("python-12m", num_threads=1)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    llm.generate(["x"] * 50, SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", len(llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_keyboard_interrupt_stops_and_the_interpreter_ends_cleanly() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "interrupted 3\n"
    assert "Traceback" not in done.stderr
    assert "Task was destroyed" not in done.stderr


def test_importing_tandem_is_light() -> None:
    code = "import sys, tandem; dir(tandem); print([m for m in ('torch', 'grpc', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

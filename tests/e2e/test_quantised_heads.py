"""A draft service serves a folder with a quantised head: it drafts what the decoded weights do, and the text stays."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gateway.text.tokenizer import TextTokenizer
from tests.e2e.servers import TARGET_MODEL, Stack, collect, draft_process, ids_of, request_of, wait_until
from tests.engine.quantised.formats import FORMATS, REAL_FORMATS, rewritten

HEAD = Path(f"{TARGET_MODEL}-eagle3")
NUM_LAYERS = 9


def write_heads(folder, form):
    """The bundled head with its linear layers in another format, and with the numbers that those stand for."""
    quantization, store = (FORMATS | REAL_FORMATS)[form]()
    stored, meant, count = rewritten(load_file(HEAD / "model.safetensors"), store)
    assert count == NUM_LAYERS
    config = json.loads((HEAD / "config.json").read_text(encoding="utf-8"))
    for name, tensors, more in (("quantised", stored, {"quantization_config": quantization}), ("decoded", meant, {})):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config | more), encoding="utf-8")


def request(prompt, *, drafts=True):
    made = request_of(prompt, max_tokens=64)
    if not drafts:
        made.speculation.num_speculative_tokens = 0
    return made


def has_first_layer(running, prompt):
    """Whether states travel as what the layer makes of them. Those that came before are rounded in another way, and a
    later prompt that begins alike would go on from them.
    """
    speculation = collect(running, request(prompt))[-1].speculation
    return 0 < speculation.hidden_state_bytes == (192 + 4) * speculation.num_hidden_states


def drafted(target, folder, prompts):
    """Greedy texts as token ids, how much of each was accepted, and the acceptance length. The folder alone says what
    its head is made for.
    """
    running = Stack.start([target], [draft_process("--target-model", TARGET_MODEL, model=str(folder))])
    try:
        wait_until(lambda: has_first_layer(running, prompts[0][::-1]), "the head's first layer at the target")
        answers = [collect(running, request(prompt)) for prompt in prompts]
    finally:
        running.close()
    counts = [pieces[-1].speculation for pieces in answers]
    accepted = [each.num_accepted_draft_tokens for each in counts]
    length = 1 + sum(accepted) / sum(each.num_spec_steps for each in counts)
    return [ids_of(pieces) for pieces in answers], accepted, length


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("form", "share"),
    [("w4a16", 0.85), *(pytest.param(form, 0.95, marks=pytest.mark.exhaustive) for form in ("w8a8", "fp8"))],
)
def test_a_quantised_head(stack, real_prompts, tmp_path, form, share):
    write_heads(tmp_path, form)
    encode = TextTokenizer.load(TARGET_MODEL).encode
    prompts = [list(encode(text))[:60] for text in real_prompts[:8]]
    (target,) = stack.targets
    texts, accepted, length = drafted(target, tmp_path / "quantised", prompts)
    _, accepted_of_decoded, _ = drafted(target, tmp_path / "decoded", prompts)
    _, _, length_of_bundled = drafted(target, HEAD, prompts)
    assert texts == [ids_of(collect(stack, request(prompt, drafts=False))) for prompt in prompts]
    assert accepted == accepted_of_decoded
    assert length_of_bundled > 2
    assert length > share * length_of_bundled

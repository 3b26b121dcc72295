"""DFlash on a paged cache, against transformers' own model and candidate generator on random weights."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation import DFlashTokenCandidateGenerator

from engine.chains import ChainJob
from engine.cuda import attention as triton_kernels
from engine.heads.blocks import PagedBlocks
from engine.heads.files.checkpoint import read_head
from engine.loading import acceleration, kernel_check
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE
from specdec.settings import ModelSettings
from tests.engine.heads import checkpoints as files

BLOCK, MASK, LAYERS = 6, 96, [1, 3, 4]
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def target():
    return files.build_target()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dflash")
    files.write_target(folder / "target", target)
    return folder


def muse(folder, window):
    """transformers' model, with a full layer between those that have a window, written to a folder."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=files.HIDDEN,
        intermediate_size=files.INTERMEDIATE,
        num_hidden_layers=3,
        num_attention_heads=files.HEADS,
        num_key_value_heads=files.KV_HEADS,
        head_dim=files.HEAD_DIM,
        rms_norm_eps=files.EPS,
        rope_parameters={"rope_type": "default", "rope_theta": files.DRAFT_ROPE},
        max_position_embeddings=512,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=LAYERS,
    )
    torch.manual_seed(3)
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def job(sequence, tokens, first, states, k):
    """What is new of a text: its tokens from ``first`` + 1 on, with the states before them."""
    new = tokens[first + 1 :]
    features = states[first : first + len(new)].contiguous()
    return ChainJob(sequence, new, k, SamplingState(GREEDY, tokens, 1, files.VOCAB), DEFAULT_RULE, features=features)


@pytest.mark.parametrize(
    ("window", "kernels"),
    [
        *((window, kernels) for window in (7, 500) for kernels in ("torch", "native")),
        (7, "triton"),
        pytest.param(500, "triton", marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_those_of_transformers(folder, target, monkeypatch, kernels, window):
    """Over rounds in which some of what was drafted is accepted, with windows shorter than the text and longer."""
    rounds = (None, 0, 3, 1, 5, 2)
    if kernels == "triton":  # in its interpreter, where the check at load takes seconds, and each round a half
        monkeypatch.setattr(acceleration, "native_attention", lambda: triton_kernels)
        monkeypatch.setattr(kernel_check, "difference", lambda *_, **__: None)
        rounds = (None, 0, 3)
    draft = muse(folder / f"muse-{window}", window)
    head = read_head(folder / f"muse-{window}", folder / "target")
    settings = ModelSettings(
        model="head", enforce_eager=kernels == "torch", kv_cache_memory_bytes=1 << 20, block_size=16, device="cpu"
    )
    paged = PagedBlocks(head, settings, 512, num_tokens=BLOCK - 1)
    oracle = DFlashTokenCandidateGenerator(
        draft, target.get_input_embeddings(), target.lm_head, GenerationConfig(max_length=200, do_sample=False)
    )
    seen = []
    logits = head.logits
    monkeypatch.setattr(head, "logits", lambda x: seen.append(logits(x)) or seen[-1])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(files.VOCAB, (62,), generator=generator).tolist()
    sequence, known, accepted = paged.pool.open(200), 0, 0
    for accepted in rounds:
        if accepted is not None:
            tokens += torch.randint(files.VOCAB, (accepted + 1,), generator=generator).tolist()
        with torch.no_grad():
            output = target(torch.tensor([tokens]), output_hidden_states=True)
            states = torch.cat([output.hidden_states[i + 1] for i in LAYERS], -1)[0]
            outputs = SimpleNamespace(hidden_states=[state[:, known:] for state in output.hidden_states])
            count = len(tokens)
            _, wanted = oracle.get_candidates(
                torch.tensor([tokens]),
                {"position_ids": torch.arange(count)[None], "attention_mask": torch.ones(1, count, dtype=torch.long)},
                outputs,
                is_first_iteration=False,
                n_last_matches=accepted or 0,
            )
        (chain,) = paged.draft_chains([job(sequence, tokens, known, states, BLOCK - 1)])
        known = count - 1
        assert sequence.length == known
        torch.testing.assert_close(seen[-1][1:], wanted[0], rtol=0, atol=1e-4)
        assert list(chain.token_ids) == wanted[0].argmax(-1).tolist()

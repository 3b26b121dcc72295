"""Prediction layers: read from every family's files, against transformers' own MTP and against the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from engine.batch import Segment
from engine.chain_job import ChainJob
from engine.heads.files.checkpoint import read_head
from engine.heads.files.mtp import export_mtp
from engine.heads.files.vocabulary_list import read_draft_vocabulary
from engine.heads.mtp import MtpHead
from engine.heads.paged import PagedHead
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.methods import method_of
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import ModelSettings
from tests.engine.heads.mtp_targets import CONFIGS, HIDDEN, VOCAB, names_of, write_mtp_target

K = 4


class MtpReference:
    """What a prediction layer computes, row by row over the whole text, by the formulas."""

    def __init__(self, family: str, body: PreTrainedModel, around: dict[str, torch.Tensor]) -> None:
        self.family, self.body, self.around = family, body, around

    @torch.no_grad()
    def __call__(self, token_ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """Tokens t + 1 and the states of t, [T, H], to outputs [T, H]."""
        embedded = self.body.get_input_embeddings()(torch.tensor(token_ids))
        if self.family == "mimo":
            embedded[0] = 0
        pair = [self.norm(embedded, "enorm"), self.norm(states, "hnorm")]
        x = torch.cat(pair[::-1] if self.family == "mimo" else pair, -1) @ self.around["eh_proj"].T
        out: torch.Tensor = self.body.get_decoder()(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return out

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        config, weight = self.body.config, self.around[name]
        eps = config.layer_norm_epsilon if self.family == "nemotron_h" else config.rms_norm_eps
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * (1 + weight if self.family.startswith("qwen") else weight)

    def chain(self, token_ids: list[int], states: torch.Tensor, count: int) -> tuple[list[int], list[torch.Tensor]]:
        """Greedy tokens after those rows, and their logits."""
        drafted: list[int] = []
        logits = []
        for _ in range(count):
            out = self(token_ids + drafted, states)
            logits.append(self.body.get_output_embeddings()(out[-1]))
            drafted.append(int(logits[-1].argmax()))
            states = torch.cat((states, out[-1:]))
        return drafted, logits


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    target, body, around = write_mtp_target(folder, request.param)
    return folder, target, MtpReference(request.param, body, around)


def settings_of(folder: Path, **changes: object) -> ModelSettings:
    options = {"model": str(folder), "device": "cpu", "kv_cache_memory_bytes": 1 << 20, "block_size": 8}
    return ModelSettings(**(options | changes))  # type: ignore[arg-type]


def text_and_states(target: PreTrainedModel, count: int, seed: int) -> tuple[list[int], torch.Tensor]:
    ids = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        states = target(ids[None], use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    return ids.tolist(), states


@pytest.mark.parametrize("eager", [True, False])
def test_chains_over_rounds_are_those_of_the_formulas(case, eager) -> None:
    """In chunks, with rejections, two sequences in a batch; the cache keeps what stands on true states."""
    folder, target, reference = case
    head = read_head(folder, folder, method="mtp")
    assert isinstance(head, MtpHead)
    assert head.hidden_state_layers == (-1,)
    paged = PagedHead(head, settings_of(folder, enforce_eager=eager), 256)
    texts = [text_and_states(target, 30, seed) for seed in (1, 2)]
    sequences = [paged.pool.open(60) for _ in texts]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=100)
    start = 0
    for end in (1, 6, 7, 19, 20, 29):
        jobs = [
            ChainJob(
                sequence,
                ids[start + 1 : end + 1],
                K,
                SamplingState(params, ids[: end + 1], 1, VOCAB),
                Rule.COUPLED,
                features=states[start:end],
            )
            for sequence, (ids, states) in zip(sequences, texts, strict=True)
        ]
        chains = paged.draft_chains(jobs)
        for chain, (ids, states) in zip(chains, texts, strict=True):
            assert list(chain.token_ids) == reference.chain(ids[1 : end + 1], states[:end], K)[0]
        start = end
    with torch.inference_mode():
        ids, states = texts[0]
        fresh = paged.pool.open(60)
        x, logits = paged.step([Segment(fresh, ids[1:], len(ids) - 1)], states[:-1], are_features=True)
    wanted = reference(ids[1:], states[:-1])
    torch.testing.assert_close(x, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, reference.body.get_output_embeddings()(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_first_draft_is_that_of_transformers(tmp_path, monkeypatch, family) -> None:
    """Which takes its layers from the same file, once it is told their number here."""
    kind = type(write_mtp_target(tmp_path, family)[0])
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    target = kind.from_pretrained(tmp_path).eval()
    target.config.dtype = torch.float32
    judge = MtpModel.from_pretrained(target).eval()
    ids, states = text_and_states(target, 25, 4)
    states, position_ids = states[:-1], torch.arange(1, 25)[None]
    with torch.no_grad():
        out = judge.forward_layer(0, states[None], position_ids, None, input_ids=torch.tensor(ids[1:])[None])
        wanted = judge.shared_head(out)[0]
    head = read_head(tmp_path, tmp_path, method="mtp")
    paged = PagedHead(head, settings_of(tmp_path), 256)
    with torch.inference_mode():
        segment = Segment(paged.pool.open(60), ids[1:], 24)
        logits = paged.step([segment], states, are_features=True)[1]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_an_exported_folder_holds_all_a_draft_needs(case, tmp_path) -> None:
    folder, target, reference = case
    names = export_mtp(folder, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert sorted(written) == names
    assert len(names) < len(load_file(folder / "model.safetensors"))
    assert not any(name.startswith(("model.layers.0.", "model.layers.1.")) for name in names)
    assert method_of(str(tmp_path)) == "mtp"
    ids, states = text_and_states(target, 12, 5)
    found = read_head(tmp_path, tmp_path)
    with torch.no_grad():
        x = found(torch.tensor(ids[1:]), states[:-1], torch.arange(11))
    torch.testing.assert_close(x, reference(ids[1:], states[:-1]), atol=1e-4, rtol=1e-4)
    shared = sum(value.numel() for name, value in found.named_parameters() if name in found.shared_names)
    assert shared == 2 * VOCAB * HIDDEN


def test_a_draft_vocabulary(case, tmp_path) -> None:
    """The likeliest of its tokens are drafted, from rows of the output layer that are theirs alone."""
    folder, target, reference = case
    chosen = list(range(1, VOCAB, 3))
    (tmp_path / "ids.json").write_text(json.dumps(chosen[::-1]))
    head = read_head(folder, folder, method="mtp")
    head.trim(read_draft_vocabulary(tmp_path / "ids.json", VOCAB))
    assert head.bodies[0].get_output_embeddings().weight.shape == (len(chosen), HIDDEN)
    paged = PagedHead(head, settings_of(folder), 256)
    ids, states = text_and_states(target, 20, 6)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=100)
    state = SamplingState(params, ids, 1, VOCAB)
    job = ChainJob(paged.pool.open(60), ids[1:], K, state, Rule.COUPLED, features=states[:-1])
    (chain,) = paged.draft_chains([job])
    text, known = ids[1:], states[:-1]
    for token_id in chain.token_ids:
        out = reference(text, known)
        logits = reference.body.get_output_embeddings()(out[-1])
        assert token_id == chosen[int(logits[chosen].argmax())]
        text, known = [*text, token_id], torch.cat((known, out[-1:]))
    assert head.to_target_ids(torch.tensor([0, 2])).tolist() == [chosen[0], chosen[2]]


@pytest.mark.parametrize("text", ["[1, 2", '{"a": 1}', "[1]", "[1, 1]", "[1, 97]", "[-1, 3]", "[1, true]", "[]"])
def test_files_that_are_no_draft_vocabulary(tmp_path, text) -> None:
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="draft_vocab"):
        read_draft_vocabulary(path, VOCAB)


def test_what_cannot_be_read_is_refused(tmp_path) -> None:
    write_mtp_target(tmp_path, "glm4_moe")
    whole = load_file(tmp_path / "model.safetensors")

    def refused(problem: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelNotSupported, match=problem):
            read_head(tmp_path, tmp_path, method="mtp")

    own = "model.layers.2."
    refused("no prediction layers", {name: value for name, value in whole.items() if not name.startswith(own)})
    for name in ("hnorm.weight", "shared_head.norm.weight"):
        refused(f"lacks {own}{name}", {key: value for key, value in whole.items() if key != own + name})
    key = f"{own}self_attn.k_proj.weight"
    refused("lacks model.layers.0.self_attn.k_proj.weight", {name: each for name, each in whole.items() if name != key})
    refused("has unknown model.layers.0.self_attn.gate", whole | {f"{own}self_attn.gate": torch.ones(3)})
    refused("another shape", whole | {key: torch.ones(3, 3)})
    refused("F8_E4M3 without a quantization_config", whole | {key: whole[key].to(torch.float8_e4m3fn)})


def test_families_with_other_states_are_refused(tmp_path) -> None:
    write_mtp_target(tmp_path, "glm4_moe")
    path = tmp_path / "config.json"
    own = path.read_text()
    for other, text in (
        ("step3p5", "'step3p5', whose prediction layers read states"),
        ("glm_moe_dsa", "'glm_moe_dsa' attends to the positions that an indexer"),  # GLM-5
    ):
        path.write_text(own.replace('"glm4_moe"', f'"{other}"'))
        with pytest.raises(ModelNotSupported, match=text):
            read_head(tmp_path, tmp_path, method="mtp")


def test_float8_with_scales_of_blocks(tmp_path) -> None:
    write_mtp_target(tmp_path, "glm4_moe")
    path, key = tmp_path / "model.safetensors", "model.layers.2.self_attn.k_proj.weight"
    whole = load_file(path)
    rounded, scales = whole[key].to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0]])
    save_file(whole | {key: rounded, f"{key}_scale_inv": scales}, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    head = read_head(tmp_path, tmp_path, method="mtp")
    found = head.bodies[0].get_decoder().layers[0].self_attn.k_proj.weight
    wanted = rounded.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    torch.testing.assert_close(found.float(), wanted.bfloat16().float())


def test_positions_keep_their_precision_in_bfloat16(tmp_path) -> None:
    write_mtp_target(tmp_path, "qwen3_5")
    exact = read_head(tmp_path, tmp_path, method="mtp").bodies[0].get_decoder().rotary_emb.inv_freq
    head = read_head(tmp_path, tmp_path, method="mtp", dtype=torch.bfloat16)
    assert head.dtype is torch.bfloat16
    assert torch.equal(head.bodies[0].get_decoder().rotary_emb.inv_freq, exact)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_files_of_speculators(tmp_path, family) -> None:
    """A layer that was trained further, beside its target."""
    target, body, around = write_mtp_target(tmp_path / "target", family)
    layer, place, names = names_of(family)
    own = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"}
    new = {f"{place}{names[name]}.weight": f"mtp_layers.0.{theirs}.weight" for name, theirs in own.items()}
    folder = tmp_path / "head"
    folder.mkdir()
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    written = {new.get(name, name.replace(layer, "mtp_layers.0.")): tensors[name] for name in tensors if "mtp" in name}
    save_file(written, folder / "model.safetensors")
    config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    config["transformer_layer_config"] = target.config.to_diff_dict()
    (folder / "config.json").write_text(json.dumps(config))
    assert method_of(str(folder)) == "mtp"
    ids, states = text_and_states(target, 12, 5)
    found = read_head(folder, tmp_path / "target")
    with torch.no_grad():
        x = found(torch.tensor(ids[1:]), states[:-1], torch.arange(11))
    wanted = MtpReference(family, body, around)(ids[1:], states[:-1])
    torch.testing.assert_close(x, wanted, atol=1e-4, rtol=1e-4)

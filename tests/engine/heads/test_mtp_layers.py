"""Several prediction layers, of which each drafts a token: by the formulas, and against transformers' own MTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_layers import MtpModel

from engine.chain_job import ChainJob
from engine.heads.files.checkpoint import read_head
from engine.heads.files.mtp import export_mtp
from engine.heads.mtp import MtpHead
from engine.heads.paged import PagedHead
from engine.sampling.state import SamplingState
from specdec.errors import ModelNotSupported
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.cuda.launches import rerun
from tests.engine.heads.mtp_targets import CONFIGS, VOCAB, write_mtp_layers
from tests.engine.heads.test_mtp import MtpReference, settings_of, text_and_states

NUM_LAYERS = 3
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=100)


def by_the_formulas(layers: list[MtpReference], token_ids: list[int], states: torch.Tensor) -> list[int]:
    """Greedy tokens after a text: layer i reads the tokens i + 1 later and what the layer before it returned."""
    drafted: list[int] = []
    for i, layer in enumerate(layers):
        states = layer([*token_ids, *drafted][i + 1 :], states)
        drafted.append(int(layer.body.get_output_embeddings()(states[-1]).argmax()))
    return drafted


def job_of(  # noqa: PLR0917
    sequence, ids: list[int], states: torch.Tensor, start: int, end: int, num_tokens: int
) -> ChainJob:
    """Feed the states from ``start`` to ``end``, of which the token after the last is the newest of ``ids``."""
    state = SamplingState(PARAMS, ids, 1, VOCAB)
    return ChainJob(
        sequence,
        ids[start + 1 : end + 1],
        num_tokens,
        state,
        Rule.COUPLED,
        states[start:end],
        positions=range(start, end),
    )


#: Nemotron 3 has one, of two parts.
FAMILIES = [family for family in CONFIGS if family != "nemotron_h"]


@pytest.mark.parametrize(("family", "is_captured"), [*((family, False) for family in FAMILIES), ("mimo", True)])
def test_chains_over_rounds_are_those_of_the_formulas(tmp_path, family, is_captured) -> None:
    """Two sequences in a batch, in chunks, with chains of every length and rounds that draft nothing: entries that
    depend on drafted tokens never stay. On a GPU graphs are replayed; here "graphs" run again.
    """
    target, layers = write_mtp_layers(tmp_path, family, NUM_LAYERS)
    reference = [MtpReference(family, *layer) for layer in layers]
    head = read_head(tmp_path, tmp_path, method="mtp")
    assert isinstance(head, MtpHead)
    paged = PagedHead(head, settings_of(tmp_path), 256)
    if is_captured:
        paged.use_graphs(rerun)
        captured = paged._graphs._captured  # type: ignore[union-attr]  # noqa: SLF001
        assert {layers for _, layers in captured} == {(0,), (1,), (2,)}, "each layer has graphs of its own"
    texts = [text_and_states(target, 30, seed) for seed in (1, 2)]
    sequences = [paged.pool.open(60) for _ in texts]
    for end, lengths in ((1, (3, 2)), (2, (3, 3)), (9, (0, 1)), (11, (1, 3)), (12, (2, 0)), (20, (3, 3)), (29, (3, 1))):
        jobs = []
        for sequence, (ids, states), num_tokens in zip(sequences, texts, lengths, strict=True):
            last = end if num_tokens else end + 1 - NUM_LAYERS  # what is ingested alone is complete
            jobs.append(job_of(sequence, ids[: end + 1], states, sequence.length, last, num_tokens))
        chains = paged.draft_chains(jobs)
        for chain, sequence, (ids, states), num_tokens in zip(chains, sequences, texts, lengths, strict=True):
            wanted = by_the_formulas(reference, ids[: end + 1], states[:end])
            assert list(chain.token_ids) == wanted[:num_tokens]
            assert sequence.length == max(0, end + 1 - NUM_LAYERS)


def test_chains_that_stop_keep_whole_entries(tmp_path) -> None:
    target, layers = write_mtp_layers(tmp_path, "qwen3_5", NUM_LAYERS)
    reference = [MtpReference("qwen3_5", *layer) for layer in layers]
    paged = PagedHead(read_head(tmp_path, tmp_path, method="mtp"), settings_of(tmp_path), 256)
    ids, states = text_and_states(target, 20, 3)
    sequence = paged.pool.open(40)
    (chain,) = paged.draft_chains([job_of(sequence, ids[:11], states, 0, 10, 3)], torch.tensor([1]).numpy())
    assert len(chain.token_ids) == 1
    (chain,) = paged.draft_chains([job_of(sequence, ids, states, sequence.length, 19, 3)])
    assert list(chain.token_ids) == by_the_formulas(reference, ids, states[:-1])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_chains_are_those_of_transformers(tmp_path, monkeypatch, family) -> None:
    """Logits to 1e-4, and the tokens. Transformers takes the layers from the same file."""
    target, _ = write_mtp_layers(tmp_path, family, 2)
    kind = type(target)
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\.", r"model\.layers\.3\."])
    target = kind.from_pretrained(tmp_path).eval()
    target.config.dtype = torch.float32
    judge = MtpModel.from_pretrained(target).eval()
    ids, states = text_and_states(target, 25, 4)
    known, positions = states[:-1], torch.arange(1, 25)[None]
    with torch.no_grad():
        tokens, wanted, _ = judge(torch.tensor(ids[1:])[None], known[None], None, positions, None)
    head = read_head(tmp_path, tmp_path, method="mtp")
    assert isinstance(head, MtpHead)
    with torch.no_grad():
        fed, features = ids[1:], known
        for i in range(2):
            features = head(torch.tensor(fed), features, torch.arange(24), layer=i)
            torch.testing.assert_close(head.logits(features[-1]), wanted[0, i], atol=1e-4, rtol=1e-4)
            fed = [*fed[1:], int(tokens[0, i])]
    paged = PagedHead(head, settings_of(tmp_path), 256)
    (chain,) = paged.draft_chains([job_of(paged.pool.open(60), ids, states, 0, 24, 2)])
    assert list(chain.token_ids) == tokens[0].tolist()


def test_an_exported_folder_holds_all_layers(tmp_path) -> None:
    for family in ("qwen3_next", "mimo"):
        folder = tmp_path / family
        write_mtp_layers(folder, family, NUM_LAYERS)
        export_mtp(folder, tmp_path / f"{family}-mtp")
        found = read_head(tmp_path / f"{family}-mtp", tmp_path / f"{family}-mtp")
        assert isinstance(found, MtpHead)
        assert len(found.layers) == NUM_LAYERS
        whole = read_head(folder, folder, method="mtp").state_dict()
        assert all(torch.equal(value, whole[name]) for name, value in found.state_dict().items())


def test_the_config_says_how_many(tmp_path) -> None:
    def named(count: int) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": count}))
        return tmp_path

    write_mtp_layers(tmp_path, "glm4_moe", 2)
    assert any(name.startswith("model.layers.3.") for name in load_file(tmp_path / "model.safetensors"))
    head = read_head(named(1), tmp_path, method="mtp")
    assert isinstance(head, MtpHead)
    assert len(head.layers) == 1
    with pytest.raises(ModelNotSupported, match="has 2 prediction layers, and its config names 3"):
        read_head(named(3), tmp_path, method="mtp")

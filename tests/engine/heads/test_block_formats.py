"""Every published layout of DFlash and DSpark loads, computes what its formula says, and is read as it was written."""

import pytest
import torch

from engine.heads.files.checkpoint import read_head, write_head
from specdec.errors import ModelNotSupported
from specdec.methods import method_of
from tests.engine.heads import block_files as blocks
from tests.engine.heads import checkpoints as files
from tests.engine.heads.block_files import BLOCK, MASK, STATES, BlockReference
from tests.engine.heads.reference import TEXT, target_states

CHAIN = [8, 90, 13]


@pytest.fixture(scope="module")
def target():
    return files.build_target()


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory):
    return files.write_target(tmp_path_factory.mktemp("target"), target)


def attend_with(reaches):
    """Attention of a block behind its context: [T + R, heads, D] keys."""

    def attend(query, key, value, layer):
        count, group = len(query), query.shape[1] // key.shape[1]
        own = torch.arange(len(key) - count, len(key))[:, None]
        other = torch.arange(len(key))
        reach = reaches[layer]
        hidden = (other > own) if reach.is_causal else torch.zeros(count, len(key), dtype=torch.bool)
        if reach.window is not None:
            hidden = hidden | (other <= own - reach.window)
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)

    return attend


def walked(head, states):
    """Logits of the tokens of a chain after the text."""
    config = head.config
    ids = torch.tensor([TEXT[-1], *[MASK] * (BLOCK - 1)])
    context = head.fuse(states[: len(TEXT) - 1])
    places = torch.arange(BLOCK)
    x = head(ids, context, torch.arange(len(context) + BLOCK), attend_with(config.reaches), places)
    walk, rows = head.walk(x), []
    for i, token in enumerate([TEXT[-1], *CHAIN]):
        rows.append(walk.step([0], torch.tensor([config.num_given + i]), torch.tensor([token]))[0])
    return x, torch.stack(rows), walk


def check(folder, pair, published, reference, method):
    target, target_folder = pair
    files.write_head_files(folder, *published)
    assert method_of(str(folder)) == method
    head = read_head(folder, target_folder)
    assert head.hidden_state_layers == STATES
    states = target_states(target, TEXT, STATES)
    h = reference.rows(TEXT[-1], [reference.fuse(state) for state in states[:-1]], range(len(TEXT) - 1))
    step = reference.after(TEXT, list(states[:-1]))
    wanted = torch.stack([step(CHAIN[:i]) for i in range(len(CHAIN) + 1)]).float()
    x, found, walk = walked(head, states)
    torch.testing.assert_close(x, torch.stack(h).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    if method == "dspark":
        confidences = reference.confidences(h, TEXT[-1], [*CHAIN, 0])
        for least in (0.2, 0.5, 0.8):
            expected = next((i for i, each in enumerate(confidences) if each < least), 4)
            assert walk.lengths([4], least) == [expected]
    write_head(head, folder / "again")
    again = read_head(folder / "again", target_folder)
    assert again.config == head.config
    torch.testing.assert_close(walked(again, states)[1], found)
    return head


def reference_of(model, config, tensors, **options):
    options = {"causal": (False, False), "windows": (None, None), "predicts_next": False} | options
    embeddings, lm_head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    return BlockReference(config, tensors, embeddings=embeddings, lm_head=lm_head, num_rows=BLOCK, **options)


@pytest.mark.parametrize(
    ("changes", "reaches"),
    [
        ({}, {"causal": (True, False), "windows": (7, None)}),
        ({"is_causal": False}, {"windows": (7, None)}),
        ({"dflash_config": {"causal": True}}, {"causal": (True, True), "windows": (7, None)}),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": False}}, {"windows": (9, 9)}),
    ],
)
def test_dflash_of_z_lab(tmp_path, target, target_folder, changes, reaches):
    config, tensors = blocks.dflash_config(), blocks.block_tensors()
    config["dflash_config"] |= changes.get("dflash_config", {})
    config |= {name: value for name, value in changes.items() if name != "dflash_config"}
    reference = reference_of(target, config, tensors, **reaches)
    check(tmp_path, (target, target_folder), (config, tensors), reference, "dflash")


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark_of_deepspec(tmp_path, target, target_folder, kind):
    config, tensors = blocks.dspark_config(kind), blocks.block_tensors(markov=kind, own=True)
    reference = reference_of(target, config, tensors, predicts_next=True, markov=kind)
    check(tmp_path, (target, target_folder), (config, tensors), reference, "dspark")


def test_dflash_of_deepspec(tmp_path, target, target_folder):
    """Its block predicts the next tokens, and there is no token to read before one."""
    config, tensors = blocks.dspark_config(markov_rank=0), blocks.block_tensors(own=True)
    config |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    reference = reference_of(target, config, tensors, predicts_next=True)
    files.write_head_files(tmp_path, config, tensors)
    head = read_head(tmp_path, target_folder)
    states = target_states(target, TEXT, STATES)
    step = reference.after(TEXT, list(states[:-1]))
    wanted = torch.stack([step(CHAIN[:i]) for i in range(len(CHAIN) + 1)]).float()
    torch.testing.assert_close(walked(head, states)[1], wanted, rtol=0, atol=1e-4)
    assert head.config.max_tokens == BLOCK


@pytest.mark.parametrize(("kind", "predicts_next"), [("dflash", False), ("dspark", True)])
def test_speculators(tmp_path, target, target_folder, kind, predicts_next):
    """They draft from a vocabulary of their own."""
    markov = "vanilla" if kind == "dspark" else None
    config = blocks.speculators_config(kind)
    tensors = blocks.block_tensors(markov=markov, draft_vocab=files.DRAFT_VOCAB)
    reference = reference_of(target, config, tensors, predicts_next=predicts_next, markov=markov)
    check(tmp_path, (target, target_folder), (config, tensors), reference, kind)


def test_dflash2_of_z_lab(tmp_path, target, target_folder):
    config, tensors = blocks.dflash2_config(), blocks.block_tensors(convolved=True)
    reference = reference_of(target, config, tensors, windows=(7, None))
    check(tmp_path, (target, target_folder), (config, tensors), reference, "dflash2")


def test_dflash2_of_speculators(tmp_path, target, target_folder):
    config, tensors = blocks.speculators_config("dflash2"), blocks.block_tensors(convolved=True)
    check(tmp_path, (target, target_folder), (config, tensors), reference_of(target, config, tensors), "dflash2")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"conv_group_size": 5}, "conv_group_size is 5; it must divide hidden_size, 32"),
        ({"selector_top_k": 98}, "selector_top_k is 98; the target has 97 tokens"),
        ({"selector_rank": None}, "selector_rank is None"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41; a DFlash2 drafts all"),
    ],
)
def test_other_selectors_are_refused(tmp_path, target_folder, changes, text):
    config = blocks.dflash2_config()
    config["dflash_config"] |= changes
    files.write_head_files(tmp_path, config, blocks.block_tensors(convolved=True))
    with pytest.raises(ModelNotSupported, match=text):
        read_head(tmp_path, target_folder)


def test_the_masks_own_embedding(tmp_path, target, target_folder):
    config, tensors = blocks.dflash_config(), blocks.block_tensors()
    embedding = torch.randn(files.HIDDEN, generator=torch.Generator().manual_seed(1))
    files.write_head_files(tmp_path, config, tensors)
    torch.save({"mask_token_id": MASK, "embedding": embedding}, tmp_path / "mask_embedding.pt")
    reference = reference_of(target, config, tensors, causal=(True, False), windows=(7, None))
    reference.embeddings = reference.embeddings.clone()
    reference.embeddings[MASK] = embedding
    states = target_states(target, TEXT, STATES)
    h = reference.rows(TEXT[-1], [reference.fuse(state) for state in states[:-1]], range(len(TEXT) - 1))
    x, _, _ = walked(read_head(tmp_path, target_folder), states)
    torch.testing.assert_close(x, torch.stack(h).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_size": None}, "block_size is None"),
        ({"num_target_layers": 9}, "num_target_layers is 9; the target has 7"),
        ({"layer_types": ["full_attention"]}, "a kind for each of 2 layers"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 4, "is_causal": False}, "sliding_window is 4.*block_size"),
        ({"dflash_config": {"mask_token_id": 97}}, "mask_token_id is 97; .*0 to 96"),
        ({"dflash_config": {"target_layer_ids": [3, 1]}}, r"the states \[4, 2\] must ascend from 0 to 7"),
        ({"dflash_config": {"target_layer_ids": [1, 7]}}, "must ascend from 0 to 7"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias = True"),
        ({"hidden_size": 16}, "hidden_size is 16; the file has no embed_tokens.weight"),
    ],
)
def test_other_variants_are_refused(tmp_path, target_folder, changes, text):
    config = blocks.dflash_config()
    config["dflash_config"] |= changes.get("dflash_config", {})
    config |= {name: value for name, value in changes.items() if name != "dflash_config"}
    files.write_head_files(tmp_path, config, blocks.block_tensors())
    with pytest.raises(ModelNotSupported, match=text):
        read_head(tmp_path, target_folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"markov_head_type": "fir"}, "markov_head_type is 'fir'; only vanilla, gated, rnn"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_rank": 0}, "confidence_head_with_markov is True; markov_rank is 0"),
    ],
)
def test_other_markov_heads_are_refused(tmp_path, target_folder, changes, text):
    config = blocks.dspark_config() | changes
    files.write_head_files(tmp_path, config, blocks.block_tensors(markov="rnn", own=True))
    with pytest.raises(ModelNotSupported, match=text):
        read_head(tmp_path, target_folder)

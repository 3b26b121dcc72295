"""PARD-2: a draft in one pass that reads the target's states beside its tokens, against the stock model."""

import json
import random

import pytest
import torch

from draft_service.drafters.state_inputs import StateInputs
from draft_service.drafters.window import DraftWindow
from engine.heads.files.packed_state_map import unpack_state_map
from specdec.errors import InvalidRequest, ModelNotSupported, NotFound
from specdec.rules import Rule
from specdec.settings import DraftSettings, SpeculativeSettings
from specdec.types import HiddenStates
from tests.draft_service.conftest import MASK, build_draft, make_model_settings, running, save_parallel
from tests.draft_service.drafters.test_draft_model import chi_square, draws_after_states, others

#: Indices of hidden_states that the config names, and as states are asked for: the target has two layers.
INDICES, LAYERS = [-1, -2, 0], (-1, 1, 0)
SCALE = 0.5
PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folders of draft and target, and the draft with its matrix and bias."""
    model = build_draft()
    width, size = len(LAYERS) * model.config.hidden_size, model.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(*shape, generator=generator) * 0.1 for shape in ((size, width), (size,)))
    folder = save_parallel(model, tmp_path_factory.mktemp("pard2"))
    torch.save({"target_proj.weight": weight, "target_proj.bias": bias}, f"{folder}/warp_model.bin")
    change(folder, pard2_target_layers=INDICES, pard2_scale=SCALE)
    return folder, model, weight, bias


def change(folder, **fields):
    path = f"{folder}/config.json"
    with open(path) as file:
        config = json.load(file) | fields
    with open(path, "w") as file:
        json.dump(config, file)


def start(made, target, k=4, *, with_states=True, window=None, **speculative):
    options = {"draft_window_size": window, "draft_sink_size": 4} if window else {}
    settings = DraftSettings(
        speculative=SpeculativeSettings(
            model=made[0], method="draft_model", num_speculative_tokens=k, **options, **speculative
        ),
        model=make_model_settings(folder=made[0], quantization=None),
        target_model=target if with_states else None,
    )
    return running(settings)


@torch.inference_mode()
def one_pass(made, token_ids, states, count, known=None):
    """What the model predicts: the states [T, F] are those of the positions; ``known`` of them are, None: all."""
    _, model, weight, bias = made
    before = torch.cat((torch.zeros(1, states.shape[1]), states[: len(token_ids) - 1]))
    if known is not None:
        before = before * torch.tensor([[float(p - 1 in known)] for p in range(len(before))])
    before = torch.cat((before, before[-1:].expand(count - 1, -1)))
    ids = torch.tensor([[*token_ids, *[MASK] * (count - 1)]])
    embedded = model.get_input_embeddings()(ids) + SCALE * (before @ weight.T + bias)
    return tuple(model(inputs_embeds=embedded, use_cache=False).logits[0, -count:].argmax(-1).tolist())


def made_up_states(made, count):
    return torch.randn(count, made[2].shape[1], generator=torch.Generator().manual_seed(5))


def rows(states, start, end):
    return HiddenStates(start, states.shape[1], "float32", states[start:end].contiguous().numpy().tobytes())


async def test_rounds_with_rejections_and_shared_prompts(made, other_checkpoint, spec):
    states, rng = made_up_states(made, 300), random.Random(1)
    prompt = others(rng, 40)
    async with start(made, other_checkpoint) as core:
        assert (await core.info()).hidden_state_layers == LAYERS
        assert not core.drafter.streams
        for name in ("a", "b"):
            session = await core.open(spec(prompt, session_id=name))
            cached = session.opened.num_cached_tokens
            assert (cached > 0) == (name == "b")
            known, new, first = list(prompt), others(rng, 1), cached
            for number in range(12):
                base, k = len(known), rng.randrange(1, 5)
                known += new
                await session.advance(base, new, k, [rows(states, first, len(known) - 1)])
                drafted = (await session.receive()).token_ids
                assert drafted == one_pass(made, known, states, k), number
                num_accepted = (0, 2, 4, 1)[number % 4]
                new, first = [*drafted[:num_accepted], *others(rng, (1, 1, 1, 9)[number % 4])], len(known) - 1
            await session.close()


async def test_a_target_that_has_the_matrix_sends_what_it_makes(made, other_checkpoint, spec):
    """Beside states as they are, in one session."""
    states = made_up_states(made, 60)
    async with start(made, other_checkpoint) as core:
        name = (await core.info()).hidden_state_map
        data = b"".join([part.data async for part in core.state_map(name)])
        matrix = unpack_state_map(data, name)
        assert matrix.layers == LAYERS
        mapped = matrix(states).detach()
        with pytest.raises(NotFound, match="'another'; its head was replaced"):
            [part async for part in core.state_map("another")]
        session = await core.open(spec(PROMPT))
        known, first = list(PROMPT), 0
        for form in (mapped, states, mapped):
            await session.advance(len(known), [1, 2], 4, [rows(form, first, len(known) + 1)])
            known += [1, 2]
            first = len(known) - 1
            assert (await session.receive()).token_ids == one_pass(made, known, states, 4)
        await session.advance(len(known), [1], 4, [rows(states[:, :5], first, first + 1)])
        with pytest.raises(InvalidRequest, match="hidden_states have 5 numbers a position"):
            await session.receive()
        await session.close()


async def test_states_that_do_not_come_are_zeros(made, other_checkpoint, spec):
    states = made_up_states(made, 60)
    async with start(made, other_checkpoint) as core:
        session = await core.open(spec(PROMPT))
        known = list(PROMPT)
        for came in (set(), {7}, {8, 9}):
            new = [1, 2][: 2 if 8 in came else 1]
            await session.advance(len(known), new, 4, [rows(states, min(came), max(came) + 1)] if came else [])
            known += new
            drafted = (await session.receive()).token_ids
            if not came:
                assert drafted == one_pass(made, known, states, 4, set())
        assert len(drafted) == 4
        await session.close()
    async with start(made, other_checkpoint, with_states=False) as core:
        assert not (await core.info()).hidden_state_layers
        session = await core.open(spec(PROMPT))
        await session.advance(6, [7], 4)
        assert (await session.receive()).token_ids == plain(made, [*PROMPT, 7], 4)
        await session.close()


@torch.inference_mode()
def plain(made, token_ids, count):
    ids = torch.tensor([[*token_ids, *[MASK] * (count - 1)]])
    return tuple(made[1](ids, use_cache=False).logits[0, -count:].argmax(-1).tolist())


async def test_a_text_beyond_the_window(made, other_checkpoint, spec):
    states, window = made_up_states(made, 200), DraftWindow(32, 4, 14)
    async with start(made, other_checkpoint, window=32) as core:
        known = [i % 40 for i in range(60)]
        session = await core.open(spec(known))
        first = 0
        for _ in range(20):
            await session.advance(len(known), [7], 4, [rows(states, first, len(known))])
            known.append(7)
            first = len(known) - 1
            places = list(window.read(range(len(known))))
            before = torch.cat((torch.zeros(1, states.shape[1]), states))[places]
            drafted = (await session.receive()).token_ids
            assert drafted == one_pass(made, window.read(known), before[1:], 4)
        await session.close()


async def test_drawn_tokens_come_with_their_rows(made, other_checkpoint, spec):
    async with start(made, other_checkpoint) as core:
        session = await core.open(spec(PROMPT, temperature=0.8, rule=Rule.BLOCK))
        await session.advance(6, [7], 4, [rows(made_up_states(made, 10), 0, 6)])
        proposal = await session.receive()
        assert len(proposal.token_ids) == 4
        assert len(proposal.q_rows) == 4
        await session.close()
        drafter, given = core.drafter, [rows(made_up_states(made, 10), 0, 6)]
        counts, sent = await draws_after_states(drafter, spec, [*PROMPT, 7], given, 2)
    assert len(sent) == 1, "a row is the same whatever was drawn before it"
    assert chi_square(counts[()], *sent.values(), 800) > 1e-4


def test_files_that_are_refused(made, other_checkpoint, tmp_path):
    folder = save_parallel(build_draft(), tmp_path)
    size = build_draft().config.hidden_size

    def refused(error, problem, tensors, **fields):
        torch.save(tensors, tmp_path / "warp_model.bin")
        change(folder, **fields)
        with pytest.raises(error, match=problem):
            StateInputs.read(folder, other_checkpoint)

    good = {"target_proj.weight": torch.ones(size, size)}
    refused(ModelNotSupported, "pard2_target_layers is None", good)
    refused(ModelNotSupported, r"pard2_target_layers is \[9\] .* -3 to 2", good, pard2_target_layers=[9])
    refused(InvalidRequest, "was trained for another target", good, pard2_target_layers=[-1, 0])
    refused(ModelNotSupported, "it has gate", good | {"gate": torch.ones(1)}, pard2_target_layers=[-1])
    refused(ModelNotSupported, "no such matrix", {"target_proj.bias": torch.ones(size)})


async def test_trees_are_refused(made, other_checkpoint):
    with pytest.raises(InvalidRequest, match="reads the target's states and drafts no tree"):
        async with start(made, other_checkpoint, tree_top_k=2, tree_depth=2):
            pass

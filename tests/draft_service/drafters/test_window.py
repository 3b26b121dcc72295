"""Draft windows: what is read of a long text, and that a draft is that of what is read alone."""

import json
import random
import shutil

import pytest

from draft_service.drafters.window import DraftWindow
from specdec.errors import InvalidRequest
from tests.draft_service.conftest import VOCAB
from tests.draft_service.proposing import propose

PROMPT = [3, 14, 15, 9, 26, 5]


def text(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("size", [16, 31, 32, 33, 64, 257])
@pytest.mark.parametrize("num_sinks", [0, 1, 4, 8])
def test_what_is_read(size, num_sinks):
    window = DraftWindow(size, num_sinks, (size - num_sinks) // 2)
    changes = 0
    for length in range(1, 4 * size):
        token_ids = list(range(length))
        read = window.read(token_ids)
        assert len(read) == length - window.num_skipped(length) <= size
        assert list(read[:num_sinks]) == token_ids[:num_sinks]
        assert list(read[num_sinks:]) == token_ids[length - len(read) + num_sinks :]
        if length <= size:
            assert list(read) == token_ids
        else:
            assert len(read) > size / 2
        assert all(list(window.read(token_ids, start)) == list(read[start:]) for start in range(0, len(read), 5))
        changes += window.num_skipped(length + 1) != window.num_skipped(length)
    assert changes == pytest.approx(3 * size / window.step, abs=1)


@pytest.mark.parametrize(
    ("size", "num_sinks", "limits"),
    [(125, 4, "from 6, for 4 first tokens, to 124"), (5, 4, "from 6"), (64, 63, "from 65, for 63 first tokens")],
)
async def test_a_window_that_does_not_fit_the_draft(start_core, size, num_sinks, limits):
    with pytest.raises(InvalidRequest, match=f"draft_window_size is {size}; it must be {limits}"):
        async with start_core(k=4, model={"max_model_len": 128}, draft_window_size=size, draft_sink_size=num_sinks):
            pass


@pytest.fixture
def windowed(checkpoint, tmp_path):
    """The draft, whose checkpoint names a window."""

    def write(size):
        folder = shutil.copytree(checkpoint, tmp_path / "draft", dirs_exist_ok=True)
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_window_size": size}))
        return str(folder)

    return write


@pytest.mark.parametrize("size", [5, 600, "64", 64.5, True, [64]])
async def test_a_window_of_a_checkpoint_that_cannot_be_used(start_core, spec, windowed, caplog, size):
    """The draft then reads the whole text."""
    async with start_core(k=4, model={"folder": windowed(size), "max_model_len": 512}) as core:
        session = await core.open(spec(text(150), max_tokens=10))
        assert (await core.load()).used_blocks == 5
        await session.close()
    assert f"draft_window_size of {size!r} is not used; it must be from 6, for 4 first tokens, to 508" in caplog.text


async def test_a_checkpoint_names_its_window(start_core, spec, windowed):
    """It holds unless the settings say something else, or the draft's context is shorter."""
    for given, context, num_blocks in ((None, 512, 2), (0, 512, 5), (128, 512, 3), (None, 64, 0)):
        model = {"folder": windowed(64), "max_model_len": context}
        async with start_core(k=4, model=model, draft_window_size=given) as core:
            session = await core.open(spec(text(150), max_tokens=10))
            assert (await core.load()).used_blocks == num_blocks, (given, context)
            await session.close()


@pytest.mark.parametrize(("size", "num_sinks"), [(64, 4), (33, 0)])
async def test_drafts_are_those_of_what_is_read(start_core, spec, greedy, size, num_sinks):
    """Over a text of many windows, whatever the verdicts; the session holds the blocks of one window only."""
    rng = random.Random(1)
    window = DraftWindow(size, num_sinks, (size - num_sinks) // 2)
    skipped = set()
    async with start_core(k=4, draft_window_size=size, draft_sink_size=num_sinks) as core:
        session = await core.open(spec(PROMPT))
        known, drafted = list(PROMPT), ()
        for _ in range(60):
            new = [*drafted[: rng.randrange(5)], *text(rng.choice((1, 1, 2, 40)), rng.random())]
            drafted = (await propose(session, len(known), new, 4)).token_ids
            known += new
            assert drafted == greedy(window.read(known), 4), len(known)
            assert (await core.load()).used_blocks <= -(-(size + 4) // 32)
            skipped.add(window.num_skipped(len(known)))
        assert len(skipped) > 5
        await session.close()


@pytest.mark.parametrize("length", [63, 64, 65, 94, 95, 96, 1000])
async def test_only_what_is_read_is_ingested(start_core, spec, greedy, monkeypatch, length):
    """A session that is opened in the middle of a text, as after the loss of a draft."""
    known, window = text(length), DraftWindow(64, 4, 30)
    async with start_core(k=4, draft_window_size=64) as core:
        rows = []
        draft = core.drafter.draft

        async def counted(batch):
            rows.append(sum(job.num_rows for job in batch))
            return await draft(batch)

        monkeypatch.setattr(core.drafter, "draft", counted)
        session = await core.open(spec(known))
        assert sum(rows) == len(window.read(known)) <= 64
        assert (await propose(session, length, [], 4)).token_ids == greedy(window.read(known), 4)
        await session.close()


async def test_tokens_taken_back(start_core, spec, greedy):
    """To before what is skipped, into it, behind it, and into the first tokens."""
    known, window = text(200), DraftWindow(64, 4, 30)
    async with start_core(k=4, draft_window_size=64) as core:
        session = await core.open(spec(known))
        for base_len in (199, 170, 150, 120, 60, 3):
            new = text(200 - base_len, base_len)
            known[base_len:] = new
            assert (await propose(session, base_len, new, 4)).token_ids == greedy(window.read(known), 4), base_len
            del known[base_len + 1 :]
            new = text(2, base_len)
            known += new
            drafted = (await propose(session, base_len + 1, new, 4)).token_ids
            assert drafted == greedy(window.read(known), 4), base_len
            known += text(200 - len(known), base_len)
            await propose(session, base_len + 3, known[base_len + 3 :], 0)
        await session.close()


@pytest.mark.parametrize("turn", [1, 20, 60])
async def test_a_text_of_windows_is_taken_up(start_core, spec, greedy, turn):
    known, window = text(150), DraftWindow(64, 4, 30)
    async with start_core(k=4, draft_window_size=64) as core:
        session = await core.open(spec(known))
        await propose(session, 150, [], 4)
        await session.close()
        known += text(turn, 2)
        session = await core.open(spec(known))
        same = window.num_skipped(len(known)) == window.num_skipped(150)
        assert session.opened.num_cached_tokens == (len(window.read(known)) - turn if same else 0)
        assert (await propose(session, len(known), [], 4)).token_ids == greedy(window.read(known), 4)
        await session.close()


async def test_texts_longer_than_the_context(start_core, spec, greedy):
    known, window = text(500), DraftWindow(96, 4, 46)
    async with start_core(k=4, model={"max_model_len": 128}, draft_window_size=96) as core:
        session = await core.open(spec(known))
        assert (await propose(session, 500, [1], 4)).token_ids == greedy(window.read([*known, 1]), 4)
        await session.close()


async def test_trees(start_core, spec):
    """A tree after a long text is that after what is read of it."""
    known, window = text(300), DraftWindow(64, 4, 30)
    async with (
        start_core(k=6, tree_top_k=2, tree_depth=3) as whole,
        start_core(k=6, tree_top_k=2, tree_depth=3, draft_window_size=64) as core,
    ):
        session, short = await core.open(spec(known)), await whole.open(spec(window.read(known)))
        tree, same = await propose(session, 300, [], 6), await propose(short, len(window.read(known)), [], 6)
        assert (tree.token_ids, tree.parents) == (same.token_ids, same.parents)
        assert tree.parents
        await session.close()
        await short.close()

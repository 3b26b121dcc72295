"""Proposals kept by what they assume."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.pending_proposals import MAX_BYTES, MAX_PENDING_PROPOSALS, PendingProposals, path_of
from specdec.types import Proposal


def proposal(base_len, assumed=(), token_ids=(9,)):
    return Proposal(1, base_len, tuple(token_ids), assumed_token_ids=tuple(assumed))


def test_paths():
    text = [1, 2, 3, 4, 5]
    assert path_of(proposal(5), text[5:]) == ()
    assert path_of(proposal(5, (6, 7)), text[5:]) == (6, 7)
    assert path_of(proposal(3, (4, 5)), text[3:]) == ()
    assert path_of(proposal(3, (4, 5, 6)), text[3:]) == (6,)
    assert path_of(proposal(3, (4, 6, 6)), text[3:]) is None
    assert path_of(proposal(3, (4,)), text[3:]) is None
    assert path_of(proposal(4), text[4:]) is None


def test_the_first_of_a_path_stays():
    branches = PendingProposals()
    first, second = proposal(3, (4,), (1,)), proposal(3, (4,), (2,))
    assert branches.keep((4,), first)
    assert not branches.keep((4,), second)
    assert (4,) in branches
    assert branches.commit((4,)) == 0
    assert branches.take() is first
    assert branches.take() is None


def test_clear_says_how_many_there_were():
    branches = PendingProposals()
    branches.keep((1,), proposal(0, (1,)))
    branches.keep((2,), proposal(0, (2,)))
    assert branches.clear() == 2
    assert len(branches) == 0


def test_bounds():
    branches = PendingProposals()
    for i in range(MAX_PENDING_PROPOSALS):
        assert not branches.full
        branches.keep((i,), proposal(0, (i,)))
    assert branches.full
    branches.commit((3,))
    assert not branches.full
    branches.keep((1,), proposal(0, (), range(MAX_BYTES // 4)))
    assert branches.full


tokens = st.lists(st.integers(0, 2), max_size=4).map(tuple)


@given(paths=st.lists(tokens, max_size=20), text=st.lists(st.integers(0, 2), max_size=6), cuts=st.data())
def test_however_the_text_is_cut_the_same_proposals_fit(paths, text, cuts):
    branches = PendingProposals()
    for path in dict.fromkeys(paths):
        branches.keep(path, proposal(0, path))
    position = 0
    while True:
        fitting = branches.take()
        here = tuple(text[:position])
        assert (fitting is not None) == (here in paths)
        if fitting is not None:
            assert fitting.assumed_token_ids == here
        if position == len(text):
            break
        count = cuts.draw(st.integers(1, len(text) - position))
        if any(tuple(text[:end]) in paths for end in range(position + 1, position + count)):
            count = 1  # a proposal in the middle of what a round commits is never asked for: it is dropped
        before = len(branches)
        dropped = branches.commit(tuple(text[position : position + count]))
        position += count
        assert dropped == before - len(branches)
        assert len(branches) == sum(path[:position] == tuple(text[:position]) for path in set(paths))

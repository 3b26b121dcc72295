"""What is left of a stream, by what was committed; and that what is verified depends on the past alone."""

from __future__ import annotations

from itertools import product

import pytest

from specdec.errors import InvalidRequest
from specdec.rules import SparseRow
from specdec.types import Proposal
from target_service.session.streamed_chain import MAX_TOKENS, StreamedChain

START = 10


class Reader:
    """A chain beside a text of which more and more is committed."""

    def __init__(self) -> None:
        self.chain = StreamedChain()
        self.committed: list[int] = []

    @property
    def length(self) -> int:
        return START + len(self.committed)

    def take(self, base_len: int, token_ids: tuple[int, ...], number: int = 1) -> bool:
        known = tuple(self.committed[base_len - START :])
        return self.chain.add(Proposal(1, base_len, token_ids, chain=number), known, self.length)

    def commit(self, *token_ids: int) -> None:
        self.committed += token_ids
        self.chain.commit(token_ids)


def test_a_chain_grows_and_is_used_up() -> None:
    reader = Reader()
    assert not reader.chain.has_begun
    assert reader.take(START, (1, 2))
    assert not reader.take(START + 2, (3,))
    assert reader.chain.token_ids == (1, 2, 3)
    reader.commit(1, 2)
    assert reader.chain.token_ids == (3,)
    reader.commit(3, 4, 5)  # the target is past it
    assert reader.chain.token_ids == ()
    assert not reader.take(START + 3, (4, 5, 6))
    assert reader.chain.token_ids == (6,)


def test_a_token_that_differs_ends_a_chain_and_the_next_number_begins_another() -> None:
    reader = Reader()
    reader.take(START, (1, 2, 3))
    assert reader.chain.over_len is None
    reader.commit(1, 9, 9)
    assert reader.chain.over_len == START + 2
    assert reader.chain.token_ids == ()
    assert not reader.take(START + 3, (4,))  # sent before the draft heard of it
    assert reader.chain.token_ids == ()
    assert reader.take(START + 2, (9, 8, 7), number=2)
    assert reader.chain.over_len is None
    reader.commit(4)
    assert reader.chain.over_len == START + 4
    reader.commit(5, 6)
    assert reader.take(START + 4, (5, 7, 8), number=3)
    assert reader.chain.over_len == START + 6
    assert reader.take(START + 6, (7, 8), number=4)
    assert reader.chain.token_ids == (7, 8)


@pytest.mark.parametrize("base_len", [START - 1, START + 2, START + 3])
def test_a_gap_or_an_overlap_ends_a_chain(base_len: int) -> None:
    reader = Reader()
    reader.take(START, (1,))
    reader.take(base_len, (2,))
    assert reader.chain.token_ids == ()


def test_no_chain_begins_after_tokens_that_are_not_committed() -> None:
    reader = Reader()
    reader.take(START + 1, (1,))
    assert reader.chain.token_ids == ()


def test_a_stream_has_no_q_no_trees_and_an_end() -> None:
    for parts in ({"q_rows": (SparseRow(b"?"),)}, {"parents": (-1, -1)}):
        with pytest.raises(InvalidRequest, match="a chain without q_rows"):
            StreamedChain().add(Proposal(1, START, (1, 2), **parts), (), START)
    reader = Reader()
    for i in range(MAX_TOKENS):
        reader.take(START + i, (1,))
    with pytest.raises(InvalidRequest, match=f"more than {MAX_TOKENS} tokens ahead"):
        reader.take(START + MAX_TOKENS, (1,))


def test_how_much_is_verified_depends_on_no_token_that_is_not_committed() -> None:
    """Every stream of four tokens of two, cut into proposals and mixed with verdicts in every way: two streams that
    agree in what was committed by then (of a later token either knows nothing) have as many tokens to verify, and are
    waited for alike.
    """
    length = 4
    for text in product((0, 1), repeat=length):
        for events in product("pv", repeat=length + 2):  # a proposal of one token comes, or a verdict of one
            counts: dict[tuple[int, tuple[int, ...]], set[tuple[int, int | None]]] = {}
            for stream in product((0, 1), repeat=length):
                reader, sent = Reader(), 0
                for number, event in enumerate(events):
                    if event == "p" and sent < length:
                        reader.take(START + sent, (stream[sent],))
                        sent += 1
                    elif event == "v" and len(reader.committed) < length:
                        reader.commit(text[len(reader.committed)])
                    past = stream[: len(reader.committed)]
                    counts.setdefault((number, past), set()).add((len(reader.chain.token_ids), reader.chain.over_len))
            assert all(len(found) == 1 for found in counts.values())

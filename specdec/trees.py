"""Token trees as lists of parents: for every token the index of the one it follows, which stands before it, or -1 for
the prefix. An empty list stands for a chain. The first tokens of a tree are a tree, too."""

from __future__ import annotations

from collections.abc import Sequence


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each token follows the one before it."""
    return all(parent == index for index, parent in enumerate(parents, -1))


def depths(parents: Sequence[int]) -> list[int]:
    """How many tokens of its tree each one follows.

    Raises :class:`ValueError` where a parent does not stand before its child.
    """
    result: list[int] = []
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise ValueError(f"parents[{index}] is {parent}; a parent stands before its child, or is -1")
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def groups(parents: Sequence[int]) -> list[int]:
    """For every token the number of its group of siblings; groups are counted in the order of their first tokens."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(parent, len(numbers)) for parent in parents]


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """The tokens from the prefix to one of them, itself included; none for -1."""
    path = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return path[::-1]


def below(parents: Sequence[int], max_depth: int) -> list[int]:
    """The tokens that follow fewer than ``max_depth`` others."""
    return [index for index, depth in enumerate(depths(parents)) if depth < max_depth]

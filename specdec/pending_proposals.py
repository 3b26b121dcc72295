"""Proposals drafted ahead of verdicts, kept until the committed tokens show which of them fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specdec.types import Proposal

#: Proposals kept for a session at most, and their bytes.
MAX_PENDING_PROPOSALS: Final = 32
MAX_BYTES: Final = 2**20

Path = tuple[int, ...]


def path_of(proposal: Proposal, known: Sequence[int]) -> Path | None:
    """What must still be committed before the proposal fits. ``known``: what is committed after its ``base_len``.

    Empty: it fits now. None: it never will, for other tokens were committed, or more of them.
    """
    assumed, count = proposal.assumed_token_ids, len(known)
    return assumed[count:] if assumed[:count] == tuple(known) else None


class PendingProposals:
    """Proposals by their path: the tokens that must be committed before each fits.

    What is committed chooses among them, nothing else does: of two proposals with one path the first stays.
    """

    def __init__(self) -> None:
        self._proposals: dict[Path, Proposal] = {}

    def __len__(self) -> int:
        return len(self._proposals)

    def __contains__(self, path: Path) -> bool:
        return path in self._proposals

    @property
    def full(self) -> bool:
        """Whether no more may be kept. Where one side drops what the verdicts ruled out that the other side has made
        at least, it is full before the other is.
        """
        num_bytes = sum(proposal.num_bytes for proposal in self._proposals.values())
        return len(self._proposals) >= MAX_PENDING_PROPOSALS or num_bytes >= MAX_BYTES

    def keep(self, path: Path, proposal: Proposal) -> bool:
        """Keep a proposal; False where one with the same path is kept already."""
        return self._proposals.setdefault(path, proposal) is proposal

    def commit(self, token_ids: Path) -> int:
        """Tokens were committed: drop the proposals that assumed others; how many."""
        before, count = len(self._proposals), len(token_ids)
        self._proposals = {
            path[count:]: proposal for path, proposal in self._proposals.items() if path[:count] == token_ids
        }
        return before - len(self._proposals)

    def take(self) -> Proposal | None:
        """The proposal that fits now, no longer kept."""
        return self._proposals.pop((), None)

    def clear(self) -> int:
        """Drop all; how many."""
        count = len(self._proposals)
        self._proposals.clear()
        return count

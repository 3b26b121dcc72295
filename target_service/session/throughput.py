"""What sessions get: the rounds of some are paced by what they cost all others, too."""

from __future__ import annotations

from weakref import WeakValueDictionary


class Throughput:
    """Tokens that the sessions of a target got, and the time they took, summed over sessions."""

    def __init__(self) -> None:
        self.num_tokens = self.session_ns = 0
        self._groups: WeakValueDictionary[str, GroupThroughput] = WeakValueDictionary()

    def of_group(self, name: str) -> GroupThroughput:
        """The part of the sessions that are paced together, which hold it."""
        part = self._groups.get(name)
        if part is None:
            self._groups[name] = part = GroupThroughput(self)
        return part


class GroupThroughput:
    """The part of the sessions that are paced together. It exists while one of them is open."""

    def __init__(self, whole: Throughput) -> None:
        self._whole = whole
        self._num_tokens, self._session_ns = whole.num_tokens, whole.session_ns

    def add(self, num_tokens: int, cycle_ns: int) -> None:
        """One of its sessions got tokens ``cycle_ns`` after those before."""
        self._num_tokens += num_tokens
        self._session_ns += cycle_ns
        self._whole.num_tokens += num_tokens
        self._whole.session_ns += cycle_ns

    @property
    def others(self) -> tuple[int, int]:
        """Tokens and nanoseconds of all other sessions, since this part began."""
        return self._whole.num_tokens - self._num_tokens, self._whole.session_ns - self._session_ns

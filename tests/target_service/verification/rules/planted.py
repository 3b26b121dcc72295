"""The compiled verifier with bugs planted in it, each behind a switch: one build for all of them, cached as the
production library is, of a changed copy of its sources."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

from engine.native import library
from specdec.compiler import compile_folder

#: What the verifier is linked with.
PARTS = ("amx", "memory", "pool", "sampling", "sampling_edits", "sampling_q")

#: By name: a whole expression or statement of ``sampling_verify.cpp``, and what takes its place.
CHAIN_BUGS = {
    "the ratio inverted": (
        "at.row.weight(x) / at.row.total / (at.q_weights[found - at.q_ids] / at.q_total)",
        "at.q_weights[found - at.q_ids] / at.q_total / (at.row.weight(x) / at.row.total)",
    ),
    "token: residual of p alone": (
        "draw(at, share, true, uniform_of(round, kResidual, accepted))",
        "draw(at, share, share != 1, uniform_of(round, kResidual, accepted))",
    ),
    "block: residual of p alone": (
        "draw(at, share, true, uniform_of(round, kResidual, accepted))",
        "draw(at, share, false, uniform_of(round, kResidual, accepted))",
    ),
    "block: stops at the first miss": (
        "if (uniform_of(round, kAccept, i - 1) < h) accepted = i, share = p;",
        "if (uniform_of(round, kAccept, i - 1) < h) accepted = i, share = p; else break;",
    ),
    "block: token's residual": (
        "if (uniform_of(round, kAccept, i - 1) < h) accepted = i, share = p;",
        "if (uniform_of(round, kAccept, i - 1) < h) accepted = i;",
    ),
    "block: P without its minimum": (
        "std::min(1.0, p * places_[first_[b] + i - 1].ratio)",
        "p * places_[first_[b] + i - 1].ratio",
    ),
    "block: h of the chain's end everywhere": ("z + 1 - p > 0 ? z / (z + 1 - p) : 1", "p"),
    "block: Z of q's support alone": ("return share * std::max(1 - named, 0.0) + above;", "return above;"),
    "block: no surplus after the end": ("if (!at.row.valid) return share;", "if (!at.row.valid) return 0;"),
    "block: the next place's q": ("surplus(places_[first_[b] + i], p)", "surplus(places_[first_[b] + i - 1], p)"),
}
TREE_BUGS = {
    "p not replaced after a rejection": ("at.rest[i] = left(i) / total;", ""),
    "q not renormalised": ("if (named) at.q[found] = 0;", "continue;"),
    "others not scaled": ("scale /= total;", ""),
    "residual of p alone": (
        "draw(at, scale, at.num_q > 0, last_uniform(round, end, depth, at.num_q > 0))",
        "draw(at, scale, false, last_uniform(round, end, depth, at.num_q > 0))",
    ),
    "the end takes the path with it": (
        "if (!at.row.valid) return {end, at.choice, 0};",
        "if (!at.row.valid) return {0, at.choice, 0};",
    ),
    "chosen as if drawn": ("round.q ? at.q[found] : 1", "1.0"),
}
_BUGS = [*CHAIN_BUGS.values(), *TREE_BUGS.values()]
_NAMES = [*CHAIN_BUGS, *TREE_BUGS]


def switched(source: str) -> str:
    """The source with every bug in it; ``tandem_planted_bug`` is the number of the one that acts, from 1, or 0."""
    for old in {old for old, _ in _BUGS}:
        assert source.count(old) == 1, old
        text = old if old.endswith(";") else f"({old})"
        for number, (place, new) in enumerate(_BUGS, 1):
            if place != old:
                continue
            if old.endswith(";"):
                text = f"if (tandem_planted_bug == {number}) {{ {new} }} else {{ {text} }}"
            else:
                text = f"(tandem_planted_bug == {number} ? {new} : {text})"
        source = source.replace(old, text)
    switch = 'extern "C" __attribute__((visibility("default"))) int tandem_planted_bug = 0;\n'
    return switch + source


class PlantedVerifier:
    """The library. ``with_bug`` may be called again: the newest choice holds."""

    def __init__(self, folder: Path) -> None:
        for source in [*library.SOURCES.glob("*.h"), *(library.SOURCES / f"{name}.cpp" for name in PARTS)]:
            (folder / source.name).write_bytes(source.read_bytes())
        text = (library.SOURCES / "sampling_verify.cpp").read_text()
        (folder / "sampling_verify.cpp").write_text(switched(text))
        self._library = ctypes.CDLL(str(compile_folder(folder, "planted")))
        self._switch = ctypes.c_int.in_dll(self._library, "tandem_planted_bug")

    def with_bug(self, name: str | None) -> SimpleNamespace:
        """The verifier's function with a bug, or with none."""
        self._switch.value = 0 if name is None else _NAMES.index(name) + 1
        function = self._library.tandem_verify_rounds
        function.argtypes = library.load().verify_rounds.argtypes  # type: ignore[union-attr]
        return SimpleNamespace(verify_rounds=function)

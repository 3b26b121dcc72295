"""Triton kernels that weigh and choose tokens and walk along drafted ones; :mod:`engine.cuda.choices` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

#: Parameters that lie wherever a batch put them.
_LISTS = ["logits", "rows", "rounds", "words", "places", "keys"]


@triton.jit
def _mixed(keys, index):
    """SplitMix64, as in :mod:`engine.sampling.noise`; shifts of int64 are arithmetic, so the masks."""
    x = keys + (index + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(keys, v):
    """Numbers in (0, 1) of tokens, float64."""
    bits = _mixed(keys, v.to(tl.int64))
    return (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _is_allowed(words, row, num_words, v):
    """Whether the bit of each token is set: bit v % 32 of word v // 32, 0 behind the last word."""
    word = tl.load(words + row * num_words + v // 32, mask=v // 32 < num_words, other=0)
    return ((word >> (v % 32)) & 1) == 1


@triton.jit(do_not_specialize=["num_tokens", "row_stride", "num_words"], do_not_specialize_on_alignment=_LISTS)
def forbid(logits, places, words, num_tokens, row_stride, num_words, TILE: tl.constexpr):  # noqa: PLR0917
    """Write -inf to the tokens whose bits are 0. Programs: (row of ``words`` [M, num_words], part of the vocabulary).

    places int64 [M]: the row of the logits, float32 [N, row_stride], that each masks.
    """
    own = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_forbidden = (v < num_tokens) & (_is_allowed(words, own, num_words, v) == 0)
    tl.store(logits + tl.load(places + own) * row_stride + v, float("-inf"), mask=is_forbidden)


@triton.jit(do_not_specialize=["num_tokens", "row_stride", "num_words"], do_not_specialize_on_alignment=_LISTS)
def choose(logits, rows, words, scores, ids, num_tokens, row_stride, num_words, TILE: tl.constexpr):  # noqa: PLR0917
    """The best token of a part of the vocabulary, the first of equal ones. Programs: (row, part).

    logits float32 [N, row_stride]; rows int64 [R, 6]: row of the logits, key of its noise, bits of a float64, its
    temperature, and what ``walk`` reads, then the row of ``words`` [M, num_words] int32 whose bits are the tokens that
    may be chosen, -1: all; scores float64 and ids int64 [R, parts]. At temperature 0 the score of a token is its logit
    l; else l / T - log E with E ~ Exp(1) of the key and the token (the logarithm of
    :func:`engine.sampling.draws.race`). A part with a NaN that may be chosen has the score NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    v = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + tl.load(rows + row * 6) * row_stride + v, mask=v < num_tokens, other=float("-inf"))
    masked_by = tl.load(rows + row * 6 + 5)
    if masked_by >= 0:
        x = tl.where(_is_allowed(words, masked_by, num_words, v), x, float("-inf"))
    score = tl.where(x == x, x, float("-inf")).to(tl.float64)  # noqa: PLR0124 - a NaN is not
    temperature = tl.load(rows + row * 6 + 2).to(tl.float64, bitcast=True)
    if temperature > 0.0:
        score = score / temperature - tl.log(-tl.log(_uniform(tl.load(rows + row * 6 + 1), v)))
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, v, 0x7FFFFFFF), 0)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0  # noqa: PLR0124
    at = row * tl.num_programs(1) + part
    tl.store(scores + at, tl.where(is_nan, float("nan"), best))
    tl.store(ids + at, token.to(tl.int64))


@triton.jit
def _choice(scores, ids, row, num_parts, p):
    """The token of the best part of a row, and 1 where its score is finite; else 0 and 0."""
    is_part = p < num_parts
    score = tl.load(scores + row * num_parts + p, mask=is_part, other=float("-inf"))
    is_nan = tl.max((score != score).to(tl.int32), 0)  # noqa: PLR0124
    best = tl.max(tl.where(score == score, score, float("-inf")), 0)  # noqa: PLR0124
    token = tl.min(
        tl.where((score == best) & is_part, tl.load(ids + row * num_parts + p, mask=is_part, other=0), 0x7FFFFFFF), 0
    )
    is_valid = (is_nan == 0) & (best > float("-inf")) & (best < float("inf"))
    return tl.where(is_valid, token, 0), is_valid.to(tl.int64)  # whatever it is, it is a token


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=_LISTS)
def walk(rows, rounds, scores, ids, out, num_parts, PADDED_PARTS: tl.constexpr):  # noqa: PLR0917
    """Accept drafted tokens while they are the choice, then emit the choice. Programs: rounds.

    rounds int64 [B, 2]: the first of a round's rows, and how many follow it, one for each drafted token; rows int64
    [R, 6] have that token and the place it follows: 0 is the round's first row. out float64 [3, B]: the place
    where the walk ends, the choice there, and whether it is valid.
    """
    own = tl.program_id(0)
    num_rounds = tl.num_programs(0)
    first = tl.load(rounds + own * 2)
    count = tl.load(rounds + own * 2 + 1)
    p = tl.arange(0, PADDED_PARTS)
    place = count * 0
    token, is_valid = _choice(scores, ids, first, num_parts, p)
    for i in range(1, count + 1):
        drafted = tl.load(rows + (first + i) * 6 + 3)
        follows = tl.load(rows + (first + i) * 6 + 4)
        if (drafted == token) & (follows == place) & (is_valid == 1):
            place = i + count * 0
            token, is_valid = _choice(scores, ids, first + i, num_parts, p)
    tl.store(out + own, place.to(tl.float64))
    tl.store(out + num_rounds + own, token.to(tl.float64))
    tl.store(out + 2 * num_rounds + own, is_valid.to(tl.float64))


@triton.jit(do_not_specialize=["num_tokens", "row_stride"], do_not_specialize_on_alignment=_LISTS)
def weigh(  # noqa: PLR0917
    logits,
    tops,
    temperatures,
    min_ps,
    keys,
    out,
    num_tokens,
    row_stride,
    HAS_MIN_P: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """exp((logit - top) / T) in float64, 0 where that is below min-p. Programs: (row, part of the vocabulary).
    HAS_NOISE: over E ~ Exp(1) of the row's key, int64 [R], and the token.

    logits float32 [R, row_stride]; tops float32, temperatures and min_ps float64 [R]; a row whose top is not finite has
    weights of 0 alone. out: float64 [R, num_tokens], or with SUMS those of parts, [R, parts].
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    v = part * TILE + tl.arange(0, TILE)
    top = tl.load(tops + row)
    safe = tl.where(tl.abs(top) < float("inf"), top, float("inf")).to(tl.float64)  # -inf - inf is -inf
    x = tl.load(logits + row * row_stride + v, mask=v < num_tokens, other=float("-inf"))
    x = tl.where(x < float("inf"), x, float("-inf")).to(tl.float64)
    weight = tl.exp((x - safe) / tl.load(temperatures + row))
    if HAS_MIN_P:
        weight = tl.where(weight >= tl.load(min_ps + row), weight, 0.0)
    if HAS_NOISE:
        weight = weight / -tl.log(_uniform(tl.load(keys + row), v))
    if SUMS:
        tl.store(out + row * tl.num_programs(1) + part, tl.sum(weight, 0))
    else:
        tl.store(out + row * num_tokens + v, weight, mask=v < num_tokens)

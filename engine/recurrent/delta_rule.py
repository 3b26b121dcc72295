"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), and Kimi's with a decay per channel (arXiv 2510.26692).

Of every value head a state S [K, V]; decay e = exp(g), rate beta, normalised query q and key k, value v:

    S = e S;  d = beta (v - Sᵀ k);  S = S + k dᵀ;  output Sᵀ q
"""

from __future__ import annotations

import torch

from engine.recurrent.state_cache import Records, Recurrence, StateShape

#: Added to the square of a norm, as transformers does.
_EPSILON = 1e-6


def delta_shape(key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor) -> StateShape:
    """Of keys [1, T, HK, K], values [1, T, HV, V] and decays [1, T, HV] or [1, T, HV, K]."""
    (key_heads, key_dim), (heads, value_dim) = key.shape[2:], value.shape[2:]
    records = {"key": (key_heads, key_dim), "delta": (heads, value_dim), "decay": tuple(decay.shape[2:])}
    return StateShape((heads, key_dim, value_dim), records)


class DeltaRule(Recurrence):
    """Rows of one layer; a key head serves neighbouring value heads."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        is_normalised: bool,
    ) -> None:
        """Queries and keys [T, HK, K], values [T, HV, V], g [T, HV] or [T, HV, K], beta [T, HV]; any dtype.

        ``is_normalised``: queries and keys come with norm 1.
        """
        query, key, value, beta, log_decay = (part.float() for part in (query, key, value, beta, log_decay))
        if not is_normalised:
            query, key = _normalise(query), _normalise(key)
        self._shared = value.shape[1] // key.shape[1]
        self._query = (query / (query.shape[-1] ** 0.5)).repeat_interleave(self._shared, dim=1)
        self._value, self._beta = value, beta
        self._key, self._decay, self._delta = key, log_decay.exp(), torch.empty_like(value)
        #: float32 [T, HV, V].
        self.outputs = torch.empty_like(value)

    @property
    def records(self) -> Records:
        """Key [T, HK, K], delta [T, HV, V], decay [T, HV] or [T, HV, K]."""
        return {"key": self._key, "delta": self._delta, "decay": self._decay}

    def fold(self, state: torch.Tensor, records: Records) -> torch.Tensor:
        """S = e S + k dᵀ."""
        return self._write(_decayed(state, records["decay"]), records["key"], records["delta"])

    def run(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A row each, as above."""
        key = self._key[rows]
        state = _decayed(state, self._decay[rows])
        known = (state * self._of_heads(key)[..., None]).sum(-2)
        delta = (self._value[rows] - known) * self._beta[rows][..., None]
        state = self._write(state, key, delta)
        self._delta[rows] = delta
        self.outputs[rows] = (state * self._query[rows][..., None]).sum(-2)
        return state

    def _of_heads(self, key: torch.Tensor) -> torch.Tensor:
        return key.repeat_interleave(self._shared, dim=1)

    def _write(self, state: torch.Tensor, key: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return state + self._of_heads(key)[..., None] * delta[..., None, :]


def _decayed(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """States [n, H, K, V] times a decay [n, H], or [n, H, K] per channel."""
    return state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _EPSILON)

"""Which classes of transformers are Llama-shaped: RMS norms, rotary halves, a gated MLP with SiLU."""

from __future__ import annotations

from typing import Final

MODELS: Final = {f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
NORMS: Final = {f"{name}RMSNorm" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
#: Rotary embeddings whose frequencies are the same at every length.
ROPE_TYPES: Final = {"default", "linear", "llama3", "yarn"}

"""The two model shapes, and the transformers configuration made from one."""

from dataclasses import dataclass

from transformers import LlamaConfig

from tandem.training.tokenizer import MAX_LENGTH, VOCAB_SIZE


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-style model with tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int = VOCAB_SIZE
    max_length: int = MAX_LENGTH

    def config(self, end_of_text_id: int = 0) -> LlamaConfig:
        """The same sizes as a `LlamaConfig`."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.max_length,
            tie_word_embeddings=True,
            bos_token_id=end_of_text_id,
            eos_token_id=end_of_text_id,
            pad_token_id=end_of_text_id,
        )


TARGET = ModelShape(hidden_size=384, num_layers=6, num_heads=6, num_kv_heads=2, intermediate_size=1152)
DRAFT = ModelShape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=384)

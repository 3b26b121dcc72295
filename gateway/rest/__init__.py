"""The OpenAI-style REST face."""

"""Other inference engines as targets: servers with OpenAI's API that take and return token ids, as vLLM's does."""

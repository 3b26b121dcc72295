"""The REST API in OpenAI's format."""

"""The decoding loop of one request, and its draft client."""

"""The gateway: requests in, tokens out; owns the decoding loop. Never imports torch."""

"""The target service: verifies proposals in batched forward passes and keeps the KV caches of sessions."""

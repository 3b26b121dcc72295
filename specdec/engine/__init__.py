"""Runs one model: loading, batches, KV pool, attention and the device thread."""

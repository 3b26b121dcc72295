"""Running a model with pinned KV: loading, ragged batches, KV pool, attention, and the thread that owns the device."""

"""The target service: scores proposals in batched forward passes and keeps sessions pinned."""

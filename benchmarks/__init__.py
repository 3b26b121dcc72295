"""Longer measurements than `tandem bench`."""

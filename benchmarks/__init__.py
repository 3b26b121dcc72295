"""Measurements beyond `tandem bench`."""

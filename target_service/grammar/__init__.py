"""Structured outputs: the target draws only tokens that continue a text of the request's language."""

"""Tandem's draft service as the drafter of other engines. No engine is imported before it is used."""

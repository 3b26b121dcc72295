"""Drafting of token trees."""

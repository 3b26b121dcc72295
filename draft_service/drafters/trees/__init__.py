"""Drafting token trees."""

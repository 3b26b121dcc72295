"""Drafters with a head on the target's hidden states."""

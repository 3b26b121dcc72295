"""Drafters, one module each; base.py has their interface."""

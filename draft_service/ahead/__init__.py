"""Drafting ahead of verdicts: the verdict tree, its scheduler, acceptance statistics and cache branches."""

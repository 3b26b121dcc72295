"""Draft heads on disk: one module a published format."""

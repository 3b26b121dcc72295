"""The tandem command: one module a subcommand."""

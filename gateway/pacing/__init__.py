"""How many tokens each session drafts a round, zero included."""

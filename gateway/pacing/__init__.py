"""How many tokens each session drafts per round, zero included."""

"""How many tokens to draft and to verify: acceptance, costs, and the choice that brings most tokens per second."""

"""What a step runs: batching, composition, draft budget."""

"""Who calls: API keys, and what each client uses."""

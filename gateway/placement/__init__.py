"""Which replica serves a session."""

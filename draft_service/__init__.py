"""The draft service: proposes tokens; one file per drafter."""

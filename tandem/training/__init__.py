"""Training of drafters for a target, and of the bundled pair."""

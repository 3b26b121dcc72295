"""How drafters are trained for a target, and how the bundled pair is made."""

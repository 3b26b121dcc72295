"""Looking up what followed the same tokens before: n-grams and suffix trees. No model and no torch."""

"""Drafters that look tokens up in earlier text: n-grams and suffix trees."""

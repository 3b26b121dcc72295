"""``tandem bench``: plain against speculative decoding in one run, and the theoretical limits."""

"""``tandem bench``: plain against speculative decoding, in one run on one machine, and the limit of the arithmetic."""

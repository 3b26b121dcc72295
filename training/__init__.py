"""How the bundled model pair is made: corpus, tokenizer, target, draft, measurements."""

"""The gateway: accepts requests, runs the decoding loop and returns text. It never imports torch."""

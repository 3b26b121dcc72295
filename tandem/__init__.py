"""Tandem: speculative decoding as a service."""

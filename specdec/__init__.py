"""Shared by all services: messages, types, options, sampling, the model engine and RPC."""

__version__ = "0.2.0"

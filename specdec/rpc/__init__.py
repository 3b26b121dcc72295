"""Serving and calling over gRPC: servers, channels, interceptors, health, reflection."""

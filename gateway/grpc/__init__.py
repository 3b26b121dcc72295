"""The gRPC API of the gateway."""

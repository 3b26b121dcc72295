"""gRPC clients of the draft and target services."""

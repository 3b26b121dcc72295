"""How the gateway reaches draft and target services over gRPC."""

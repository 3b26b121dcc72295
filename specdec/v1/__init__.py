"""Generated protobuf and gRPC stubs (``make protos``); never edited by hand."""

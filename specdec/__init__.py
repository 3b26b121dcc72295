"""The ground floor of Tandem: the wire, its types, sampling, the model engine and the RPC plumbing."""

__version__ = "0.1.0"

"""Calls over a Unix domain socket without HTTP/2: a connection is a call, its messages are frames."""

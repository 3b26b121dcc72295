"""A client of HTTP/2 that sends more headers than any client needs and acknowledges no settings."""

import struct


def _frame(kind, flags, stream, content=b""):
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def literal_header(name, value):
    """A literal header of HPACK without Huffman coding, in Latin-1."""
    return b"\x00" + b"".join(bytes([len(text)]) + text.encode("latin-1") for text in (name, value))


#: A header of one byte: a date without a value, which stands in the static table of HPACK.
EMPTY_DATE = b"\xa1"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)
REQUEST_HEADERS = b"".join(
    literal_header(name, value)
    for name, value in (
        (":method", "POST"), (":scheme", "http"), (":path", "/specdec.v1.GenerationService/Generate"),
        (":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers"),
    )
)  # fmt: skip


def header_flood(header, count, *, end=False):
    """A connection with one call, which has ``count`` times the same header; ``end`` marks the last one."""
    per_frame = 16_384 // len(header)
    frames = [_frame(9, 0, 1, header * min(per_frame, count - i)) for i in range(0, count, per_frame)]
    last = _frame(9, 4 if end else 0, 1)
    return PREFACE + _frame(1, 0, 1, REQUEST_HEADERS) + b"".join(frames) + last

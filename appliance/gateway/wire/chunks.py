"""HTTP's chunked framing, as far as streams are passed on without a parser (RFC 9112, 7.1). Pure."""

from __future__ import annotations

SIZE_BYTES_MAX = 8  # digits of a chunk's size and the line break after them


def content_of(frames: bytes) -> bytes | None:
    """Return what whole chunks contain. None if the bytes are anything else, or if the last chunk is among them.

    None, too, if a size is written in an unusual way, so that two readers of the same bytes never see different chunks.
    """
    begin = frames.find(b"\r\n", 0, SIZE_BYTES_MAX) + 2
    size = len(frames) - begin - 2
    if size > 0 and frames.startswith(b"%x\r\n" % size) and frames.endswith(b"\r\n"):
        return frames[begin:-2]  # one chunk, as nearly always
    found, at = [], 0
    while at < len(frames):
        begin = frames.find(b"\r\n", at, at + SIZE_BYTES_MAX) + 2
        try:
            end = begin + int(frames[at : begin - 2], 16)
        except ValueError:
            return None
        after = end + 2
        if not (begin < end and frames[end:after] == b"\r\n" and frames[at:begin] == b"%x\r\n" % (end - begin)):
            return None
        found.append(frames[begin:end])
        at = after
    return b"".join(found)

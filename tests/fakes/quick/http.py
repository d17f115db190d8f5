"""The part of `http.server` that a fake engine needs, without `http.client`, `email` and `ssl`."""

from __future__ import annotations

from socketserver import StreamRequestHandler

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Headers:
    """Headers in their order; a name is found in any case."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._pairs = pairs

    def items(self) -> list[tuple[str, str]]:
        return self._pairs

    def get(self, name: str, default: str = "") -> str:
        return next((value for known, value in self._pairs if known.lower() == name.lower()), default)


class RequestHandler(StreamRequestHandler):
    """Reads requests until a side closes, and calls `answer` with the body of each."""

    command: str
    path: str
    headers: Headers
    close_connection: bool

    def handle(self) -> None:
        while self.read_request():
            self.answer(self.read_body())
            self.wfile.flush()
            if self.close_connection:
                return

    def read_request(self) -> bool:
        """Read a request up to its body. Returns False at the end of the connection."""
        line = self.rfile.readline(65537).decode("latin-1").strip()
        if not line:
            return False
        self.command, self.path, version = line.split(" ")
        pairs = []
        while header := self.rfile.readline(65537).decode("latin-1").strip():
            name, _, value = header.partition(":")
            pairs.append((name, value.strip()))
        self.headers = Headers(pairs)
        kept = self.headers.get("Connection").lower()
        self.close_connection = kept == "close" or (version == "HTTP/1.0" and kept != "keep-alive")
        if self.headers.get("Expect").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._head: list[str] = []
        return True

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, body: bytes) -> None:
        raise NotImplementedError

    def send_response(self, status: int) -> None:
        self.log_message('"%s" %s -', f"{self.command} {self.path} HTTP/1.1", status)
        self._head = [f"HTTP/1.1 {status} {REASONS[status]}", "Server: fake"]

    def send_header(self, name: str, value: str) -> None:
        self._head.append(f"{name}: {value}")

    def end_headers(self) -> None:
        self.wfile.write("\r\n".join((*self._head, "", "")).encode("latin-1"))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

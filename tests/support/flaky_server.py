"""A local HTTP server of a folder, with ranges and ETags, whose requests fail as scheduled."""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Fault:
    """What is wrong with the answer to a request; each field alone, or several together.

    Args:
        status: answer with this status and an empty body
        close: close the connection without an answer
        raw: send these bytes in place of an answer, then close the connection
        truncate: send only so many bytes of the body, then close the connection
        stall_s: after `truncate` bytes of the body, or else before the answer, wait for so long
        drip_s: wait for so long before each byte of the body
        ignore_range: send the whole file with status 200
        no_length: leave out Content-Length and the size in Content-Range
        etag: this ETag instead of the file's
        redirect: answer 302 to this URL
    """

    status: int = 0
    close: bool = False
    raw: bytes = b""
    truncate: int | None = None
    stall_s: float = 0.0
    drip_s: float = 0.0
    ignore_range: bool = False
    no_length: bool = False
    etag: str = ""
    redirect: str = ""


@dataclass(frozen=True)
class Request:
    """A request as it came: its number from 0, method, path with query, and headers in lower case."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class FlakyServer:
    """A running server. `fault_of` may be replaced, and `requests` cleared, at any time; `released` ends all
    stalls."""

    url: str
    fault_of: Callable[[Request], Fault | None]
    requests: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str = "", method: str = "") -> int:
        """The number of requests of a file, by a method; of any without one."""
        return sum(
            unquote(urlsplit(each.path).path[1:]) == (name or unquote(urlsplit(each.path).path[1:]))
            and each.method == (method or each.method)
            for each in list(self.requests)
        )

    def fail(self, *faults: Fault | None) -> None:
        """Schedule faults for the next requests, in their order; those after them succeed."""
        schedule = iter(faults)
        self.fault_of = lambda request: next(schedule, None)

    def next_fault(self, method: str, path: str, headers: Mapping[str, str]) -> Fault:
        with self._lock:
            request = Request(len(self.requests), method, path, headers)
            self.requests.append(request)
            return self.fault_of(request) or Fault()


@contextmanager
def flaky_server(
    folder: Path, fault_of: Callable[[Request], Fault | None] = lambda request: None
) -> Iterator[FlakyServer]:
    """Serve a folder on a port of 127.0.0.1. `fault_of` decides what is wrong with an answer."""

    class Handler(_Handler):
        root = folder

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exc_info()[1], OSError):  # a client that leaves early is no error
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    httpd = Server(("127.0.0.1", 0), Handler)
    Handler.server_state = state = FlakyServer(f"http://127.0.0.1:{httpd.server_port}", fault_of)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body does not wait for the acknowledgement of the headers
    root: Path
    server_state: FlakyServer

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self.server_state.next_fault(self.command, self.path, headers)
        file = self.root / unquote(urlsplit(self.path).path[1:])
        if fault.stall_s and fault.truncate is None:
            self.server_state.released.wait(fault.stall_s)
        if fault.close or fault.raw:
            self.wfile.write(fault.raw)
            self.close_connection = True
        elif fault.redirect:
            self._answer(302, {"Location": fault.redirect})
        elif fault.status or not file.is_file():
            self._answer(fault.status or 404, {})
        else:
            self._send(file.read_bytes(), headers.get("range", ""), fault)

    do_HEAD = do_GET

    def _send(self, content: bytes, range_: str, fault: Fault) -> None:
        etag = fault.etag or hashlib.sha256(content).hexdigest()[:16]
        headers = {"ETag": f'"{etag}"'}
        body, status = content, 200
        if range_ and not fault.ignore_range:
            first, _, last = range_.removeprefix("bytes=").partition("-")
            body, status = content[int(first) : int(last or len(content)) + 1], 206
            total = "*" if fault.no_length else len(content)
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{total}"
            if not body:
                return self._answer(416, {"Content-Range": f"bytes */{total}"})
        return self._answer(status, headers, body, fault)

    def _answer(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes = b"",
        fault: Fault = Fault(),
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if fault.no_length:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            if self.command != "HEAD":
                body = body[: fault.truncate]
                for part in [body[n : n + 1] for n in range(len(body))] if fault.drip_s else [body]:
                    self.server_state.released.wait(fault.drip_s)
                    self.wfile.write(part)
                if fault.truncate is not None and fault.stall_s:
                    self.server_state.released.wait(fault.stall_s)
        except OSError:  # the client has left
            self.close_connection = True
        self.close_connection |= fault.no_length or fault.truncate is not None

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

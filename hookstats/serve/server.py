"""HTTP: who may ask, for what, how long and how much. Reads only, and opens no path that comes from a request."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

HEAD_SECONDS = 10.0  # until a request has come; a body is not read
ANSWER_SECONDS = 120.0  # until the answer has been read
CONNECTIONS = 48  # at once, each with a thread
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_BARE = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


class Answer(NamedTuple):
    """An answer. policy: the Content-Security-Policy; packed: whether the body is in gzip; tag: its ETag, if any."""

    status: HTTPStatus
    body: bytes
    type: str = "text/plain; charset=utf-8"
    policy: str = _BARE
    packed: bool = False
    tag: str = ""


class Query(NamedTuple):
    """path: as it was asked, still quoted; given: the last value of each name behind the question mark."""

    path: str
    given: dict[str, str]


class Server(ThreadingHTTPServer):
    """``answers`` is called with a query, in one of at most 48 threads."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, answers: Callable[[Query], Answer], has_token: bool = True) -> None:
        """port 0: any. OSError where it cannot be had."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answers = answers
        self.token = secrets.token_urlsafe(24) if has_token else None
        self._until: dict[socket.socket, float] = {}  # when each connection is closed
        self._host, self._own = host, _as_address(host)
        super().__init__((host, port), _Handler)
        self.port = int(self.server_address[1])

    @property
    def is_local(self) -> bool:
        return self._host == "localhost" or (self._own is not None and self._own.is_loopback)

    @property
    def address(self) -> str:
        """The address to open in a browser, with the token."""
        is_any = not self._host or (self._own is not None and self._own.is_unspecified)
        shown = socket.gethostname() if is_any else self._host
        shown = f"[{shown}]" if ":" in shown else shown
        return f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def describe(self) -> list[str]:
        """Lines for whoever has started it: the address, and who else can ask."""
        lines = [f"runs are shown at {self.address}"]
        if not self.is_local:
            lines.append(f"warning: {self._host} can be asked from other machines, and what is sent is not encrypted")
        if self.token is None:
            lines.append("warning: there is no token: whoever can ask sees all runs, other users of this machine, too")
        return lines

    def is_asked_as(self, host: str) -> bool:
        """Tell whether a Host header names this server: another page's name that leads here by DNS does not."""
        name, _, port = host.rpartition(":") if re.search(r":\d*$", host) else (host, "", "80")
        name = name.lower()
        if port != str(self.port):
            return False
        if name in _LOOPBACK or name.strip("[]") == self._host.lower():
            return True
        is_address = _as_address(name.strip("[]")) is not None
        return not self.is_local and (is_address or name == socket.gethostname().lower())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many; then the connection is closed."""
        if len(self._until) >= CONNECTIONS:
            self.shutdown_request(request)
            return
        self.keep(request, HEAD_SECONDS)
        super().process_request(request, client_address)

    def keep(self, request: socket.socket, seconds: float) -> None:
        """A connection is closed when its time is over, whatever comes or goes meanwhile, a byte at a time."""
        self._until[request] = time.monotonic() + seconds

    def shutdown_request(self, request: Any) -> None:
        self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second."""
        now = time.monotonic()
        for request in [each for each, until in list(self._until.items()) if until < now]:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a reader that went away
            print(f"hookstats serve: {type(error).__name__}: {error}", file=sys.stderr)


def open_server(host: str, port: int, answers: Callable[[Query], Answer], has_token: bool = True) -> Server:
    """Open a server at that port, or at another one if it is taken. ValueError for a port that is none."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port: expected a number from 0 to 65535, got {port}")
    try:
        return Server(host, port, answers, has_token)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return Server(host, 0, answers, has_token)


class _Handler(BaseHTTPRequestHandler):
    """Handler of one request for each connection."""

    server: Server
    timeout = HEAD_SECONDS
    server_version = "hookstats"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # not 0.9, which has no headers

    def do_GET(self) -> None:
        self.server.keep(self.request, ANSWER_SECONDS)
        self.request.settimeout(ANSWER_SECONDS)
        self._send(*self._answer())

    do_HEAD = do_GET

    def _send(self, answer: Answer, more: dict[str, str]) -> None:
        """more: headers."""
        if answer.tag:
            more = {**more, "ETag": f'"{answer.tag}"'}
            if self.headers.get("If-None-Match") == more["ETag"]:
                answer = answer._replace(status=HTTPStatus.NOT_MODIFIED, body=b"")
        self.send_response(answer.status)
        for name, value in {**_HEADERS, "Content-Security-Policy": answer.policy, **more}.items():
            self.send_header(name, value)
        if answer.packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", answer.type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _answer(self) -> tuple[Answer, dict[str, str]]:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not self.server.is_asked_as(hosts[0].strip()):
            names = "The Host header names another server. Ask by the address that hookstats serve has printed."
            return answer_text(HTTPStatus.MISDIRECTED_REQUEST, names), {}
        try:
            asked = urlsplit(self.path)
            given = {name: values[-1] for name, values in parse_qs(asked.query, max_num_fields=16).items()}
        except ValueError:
            return answer_text(HTTPStatus.BAD_REQUEST, "The address cannot be read."), {}
        token = self.server.token
        if token is not None:
            if _equal(given.get("token"), token):
                cookie = f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Lax"
                moved = answer_text(HTTPStatus.SEE_OTHER, "")
                return moved, {"Location": "/", "Set-Cookie": cookie}
            if not any(_equal(each, token) for each in self._cookies()):
                words = "This page needs the token: open the whole address that hookstats serve has printed."
                return answer_text(HTTPStatus.FORBIDDEN, words), {}
        try:
            return self.server.answers(Query(asked.path, given)), {}
        except Exception as error:
            print(f"hookstats serve: {type(error).__name__}: {error}", file=sys.stderr)
            return answer_text(HTTPStatus.INTERNAL_SERVER_ERROR, "This page could not be made."), {}

    @property
    def _cookie(self) -> str:
        return f"hookstats-{self.server.port}"  # cookies are shared by all ports of a host

    def _cookies(self) -> list[str]:
        pairs = (each.strip().partition("=") for line in self.headers.get_all("Cookie", []) for each in line.split(";"))
        return [value for name, _, value in pairs if name == self._cookie]

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send what http.server refuses by itself, in our words and with our headers."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        allow = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._send(answer_text(status, f"{status.phrase}."), {**allow, "Connection": "close"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what is asked comes from anybody, and a token may stand in it."""


def answer_text(status: HTTPStatus, words: str) -> Answer:
    """A sentence as plain text."""
    return Answer(status, f"{words}\n".encode())


def _equal(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _as_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None

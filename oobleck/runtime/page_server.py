"""Serves one page that changes, over HTTP, to browsers of this machine that know its token."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from oobleck.errors import OobleckError, UsageError

_log = logging.getLogger("oobleck.ui")

_CLIENT_TIMEOUT_S = 10.0
_TOKEN_BYTES = 16


class PageServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and answers GET of one path, which has a new random token; all else is 404 or 501.

    Other users of the machine can connect, and a page of another site can make a browser connect: neither knows the
    token. A client is a thread, so `page` has to be thread-safe.
    """

    daemon_threads = True

    def __init__(self, page: Callable[[], str], *, port: int, headers: Mapping[str, str]) -> None:
        """Listen on `port`, or on one that is free if it is 0; `headers` go with the page. Raises UsageError."""
        self.page, self.page_headers = page, headers
        self.page_path = f"/{secrets.token_urlsafe(_TOKEN_BYTES)}/"
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(f"--port: cannot listen on 127.0.0.1:{port}: {error.strerror}") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.page_path}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _CLIENT_TIMEOUT_S
    server_version, sys_version = "oobleck", ""

    def do_GET(self) -> None:
        """Answer with the page as it is now."""
        if not hmac.compare_digest(self.path.encode(), self.server.page_path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = self.server.page().encode()
        except OobleckError as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        for name, value in self.server.page_headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the base has it
        _log.debug("%s", args[0] if args and self.server.page_path not in str(args[0]) else "the page")

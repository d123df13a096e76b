"""An S3 server of a test's own: moto's, behind a gate that can misbehave as stores do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import pytest

__all__ = ["KEYS", "Store", "serve_s3"]

pytest.importorskip("s3fs")
pytest.importorskip("moto.moto_server")

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from oobleck.host.places import prepare_fsspec

KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "hidden-5f1c9e", "AWS_DEFAULT_REGION": "us-east-1"}
_ANSWERS = {
    "SlowDown": "503 Slow Down",
    "ExpiredToken": "400 Bad Request",
}
_Start = Callable[..., Any]


@dataclass
class Store:
    """A store's address, and what it does to the next requests."""

    url: str = ""
    refuses: dict[str, int] = field(default_factory=dict)
    """How many requests it answers with which error, from now on."""
    cuts: int = 0
    """How many writes it keeps half of, and says that all is well."""
    answered: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL": self.url}


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  the library's name
        pass


@contextmanager
def serve_s3(*buckets: str) -> Iterator[Store]:
    """Serve buckets, which exist, on a free port of the loopback interface."""
    store, lock = Store(), threading.Lock()
    application = DomainDispatcherApplication(create_backend_app)

    def gate(environ: dict[str, Any], start: _Start) -> Any:
        with lock:
            error = next((name for name, count in store.refuses.items() if count > 0), None)
            if error is not None:
                store.refuses[error] -= 1
                store.answered.append(error)
            is_cut = error is None and environ["REQUEST_METHOD"] == "PUT" and store.cuts > 0
            is_cut = is_cut and int(environ.get("CONTENT_LENGTH") or 0) > 100
            store.cuts -= is_cut
        if error is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<?xml version='1.0'?><Error><Code>{error}</Code><Message>no</Message></Error>".encode()
            start(_ANSWERS[error], [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if is_cut:
            store.answered.append("cut")
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = _Half(body)
            environ["CONTENT_LENGTH"] = str(len(body) // 2)
            for header in [name for name in environ if "CHECKSUM" in name or "MD5" in name or "CONTENT_SHA256" in name]:
                del environ[header]
        return application(environ, start)

    server = make_server("127.0.0.1", 0, gate, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    store.url = f"http://127.0.0.1:{server.server_port}"
    try:
        import s3fs

        prepare_fsspec()
        # moto keeps what it stores in this process, so an earlier server's buckets would still be there.
        with urlopen(Request(f"{store.url}/moto-api/reset", method="POST"), timeout=20):
            pass
        client = s3fs.S3FileSystem(
            key="tester", secret="hidden", endpoint_url=store.url, skip_instance_cache=True, use_listings_cache=False
        )
        for bucket in buckets:
            client.mkdir(bucket)
        yield store
    finally:
        server.shutdown()
        thread.join()


class _Half:
    def __init__(self, body: bytes) -> None:
        self._body = body[: len(body) // 2]

    def read(self, size: int = -1) -> bytes:
        taken = self._body if size < 0 else self._body[:size]
        self._body = self._body[len(taken) :]
        return taken

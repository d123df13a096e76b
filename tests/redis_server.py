"""A Redis server of a test's own: a real one, on a free port, that keeps nothing."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["needs_redis", "serve_redis"]

_SERVER = shutil.which("redis-server")
_WHY_NOT = (
    "there is no redis-server: apt-get install redis-server"
    if _SERVER is None
    else "Redis' client is not installed: pip install redis"
)
needs_redis = pytest.mark.skipif(_SERVER is None or importlib.util.find_spec("redis") is None, reason=_WHY_NOT)


@contextmanager
def serve_redis(directory: Path) -> Iterator[int]:
    """Start a server; yields its port on the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert _SERVER is not None
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    process = subprocess.Popen([_SERVER, *options], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 20.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s, "redis-server does not answer"
                assert process.poll() is None, f"redis-server ended with {process.returncode}"
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait()

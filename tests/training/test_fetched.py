"""Models of the hub and files at URLs: fetched once, and again where they have changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import s3fs

from oobleck.errors import ConfigError
from oobleck.job import DataSpec
from oobleck.training.data.text import read_documents
from oobleck.training.fetched import file_of
from tests.s3_server import serve_s3

SHA = "5f1c9e" + "0" * 34
FILES = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"weights", "README.md": b"unwanted"}


@contextmanager
def serve_hub() -> Iterator[tuple[str, list[str]]]:
    """A hub with one model; yields its address, and the files that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.split("?")[0].rpartition("/")[2]
            if self.path.startswith("/api/models/acme/tiny"):
                siblings = [{"rfilename": each} for each in FILES]
                tree = [{"type": "file", "path": each, "size": len(FILES[each]), "oid": SHA} for each in FILES]
                listed: Any = tree if "/tree/" in self.path else {"id": "acme/tiny", "sha": SHA, "siblings": siblings}
                body = json.dumps(listed).encode()
            elif self.path.startswith("/acme/tiny/resolve/") and name in FILES:
                asked.append(name)
                body = FILES[name]
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{name}"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def fetch_model(named: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Ask for a model in a process of its own: the hub's client reads its variables once."""
    code = (
        "import sys\nfrom oobleck.training.fetched import model_directory\nfrom oobleck.errors import ConfigError\n"
        "try:\n    print(model_directory(sys.argv[1], 'model.path'))\n"
        "except ConfigError as error:\n    sys.exit(str(error))"
    )
    environment = {**os.environ, "HF_HOME": str(cache), **variables}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [sys.executable, "-c", code, named], capture_output=True, text=True, timeout=200, check=False, env=environment
    )


def test_a_model_comes_from_the_hub_once_and_from_its_cache_after_that(tmp_path: Path) -> None:
    with serve_hub() as (address, asked):
        first = fetch_model("acme/tiny", tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        assert first.returncode == 0, first.stderr
        directory = Path(first.stdout.splitlines()[-1])
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
            name: content for name, content in FILES.items() if name != "README.md"
        }
        assert "README.md" not in asked
        asked.clear()
        again = fetch_model("acme/tiny", tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        assert (again.stdout, asked) == (first.stdout, [])
    offline = fetch_model("acme/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout
    missing = fetch_model("acme/other", tmp_path, HF_HUB_OFFLINE="1")
    assert missing.returncode == 1
    for told in (
        "no directory on this node",
        f"not in the hub's cache ({tmp_path}/hub)",
        "cannot be had from https://",
    ):
        assert told in missing.stderr


def test_a_path_that_is_no_hub_s_name_is_left_to_its_reader(tmp_path: Path) -> None:
    done = fetch_model("./acme/tiny", tmp_path)
    assert done.stdout == "acme/tiny\n"


def test_files_at_a_url_are_read_and_fetched_again_once_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serve_s3("bucket") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        files.pipe("bucket/texts/a.txt", b"first text")
        files.pipe("bucket/texts/deep/b.jsonl", b'{"text": "second text"}\n')
        spec = DataSpec(paths=("s3://bucket/texts",))
        assert read_documents(spec) == ["first text", "second text"]
        store.refuses = {"SlowDown": 2}
        assert file_of("s3://bucket/texts/a.txt", "data.paths").read_bytes() == b"first text"
        files.pipe("bucket/texts/a.txt", b"other text")
        assert read_documents(spec) == ["other text", "second text"]
        with pytest.raises(ConfigError, match=r"data\.paths: there is nothing at s3://bucket/none"):
            file_of("s3://bucket/none", "data.paths")

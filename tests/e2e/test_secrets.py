"""Secrets of a run reach what needs them, and are in nothing that the run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import oobleck
from oobleck.errors import RunFailed
from tests.redis_server import needs_redis, serve_redis
from tests.serving import serving

from .harness import TAG, Runner

pytestmark = [pytest.mark.slow, needs_redis]

PASSWORD, HEADER, VARIABLE, ARGUMENT, USER = (f"{word}-5f1c9e" for word in ("stream", "meta", "vari", "argu", "userof"))
HOOK = "hook-5f1c9e"
SECRETS = (HOOK, PASSWORD, HEADER, VARIABLE, ARGUMENT, USER)
SCRIPT = """
import logging, os, sys
from oobleck import Job

FAILS = "--fails" in sys.argv

def lr_lambda(step):
    if "OOBLECK_NODE" in os.environ:  # in a worker; elsewhere it would be the script's own output
        logging.getLogger("oobleck.mine").warning("the token is %s", os.environ["MY_TOKEN"])
    if step == 25 and FAILS:
        raise RuntimeError(f"refused with {os.environ['MY_TOKEN']} by {os.environ['REDIS_URL']}")
    return 1.0

def job():
    return Job(lr_lambda=lr_lambda)
"""


@contextmanager
def metadata_server() -> Iterator[tuple[str, list[str | None]]]:
    """A server that knows of no notice; yields its place, and the headers that it has been sent."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("X-Meta-Token"))
            self.send_error(404)

        def do_POST(self) -> None:
            assert self.path == f"/hooks/{HOOK}"
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"127.0.0.1:{server.server_port}", seen


def revealing(*directories: Path) -> list[str]:
    """The files below directories in whose names or contents there is a secret."""
    found = []
    for directory in directories:
        for path in directory.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            found += [f"{path}: {each}" for each in SECRETS if each in path.name or each.encode() in content]
    return found


@contextmanager
def job_of(directory: Path, *, token: str) -> Iterator[tuple[dict[str, Any], list[str | None]]]:
    """Settings with a secret in each place that may have one, and what the metadata server was sent."""
    with serve_redis(directory) as port, metadata_server() as (place, seen):
        client = redis.Redis(port=port)
        for number in range(400):
            client.xadd("rows", {"tokens": bytes([number % 250, 1] * 16)})
        client.set("rows:end", "1")
        client.config_set("requirepass", PASSWORD)
        yield (
            {
                "tag": TAG,
                "model": {"type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 2},
                "data": {"shards": [f"redis://:{PASSWORD}@127.0.0.1:{port}/rows"], "sequence_length": 16,
                         "vocab_size": 600},
                "max_steps": 40, "global_batch_size": 4, "num_pipelines": 2, "torch_threads": 1,
                "control": {"notice_url": f"http://{place}/notice?token={USER}", "notice_interval_s": 0.5,
                            "notice_headers": {"X-Meta-Token": token}, "start_timeout_s": 200, "lease_s": 10},
                "env": {"MY_TOKEN": VARIABLE, "REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1/0"},
            },
            seen,
        )  # fmt: skip


def test_a_run_and_its_takeover_have_secrets_and_leave_none(runner: Runner, tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "job.yaml"
    script.write_text(SCRIPT)
    with job_of(tmp_path, token="${META_TOKEN}") as (settings, seen):
        own = settings.pop("env")
        file.write_text(yaml.safe_dump(settings))
        variables = tmp_path / "variables"
        variables.write_text("".join(f"{name}={value}\n" for name, value in (own | {"META_TOKEN": HEADER}).items()))
        words = ("--job", str(file), "--env-file", str(variables), str(script), "--", "--hub-token", ARGUMENT)
        with runner.up(*words) as up:
            up.wait_for_step(8)
            up.process.kill()
            up.process.wait()
            assert revealing(runner.base_dir, runner.temporary) == []
        assert set(seen) == {HEADER}
        seen.clear()
        with runner.up(*words) as again:
            outcome = again.finish()
    assert (outcome.exit_code, "a new master takes over" in outcome.output) == (0, True), outcome.output
    assert outcome.summary["steps_committed"] == 40
    assert set(seen) == {HEADER}
    assert not any(secret in outcome.output for secret in SECRETS)
    logs = "".join(path.read_text() for path in (runner.base_dir / TAG).glob("agent*.log"))
    assert "the token is …" in logs
    assert revealing(runner.base_dir, runner.temporary) == []


def test_a_failure_s_own_words_have_none(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with job_of(tmp_path, token=HEADER) as (settings, _):
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(settings))
        with runner.up("--job", str(file), str(script), "--", "--fails", f"--api-key={ARGUMENT}") as up:
            outcome = up.finish()
    assert outcome.exit_code != 0
    assert "refused with … by redis://127.0.0.1/0" in outcome.output
    assert not any(secret in outcome.output for secret in SECRETS)
    assert revealing(runner.base_dir, runner.temporary) == []


def test_a_job_given_to_launch_leaves_none(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(runner.temporary))
    with job_of(tmp_path, token=HEADER) as (settings, seen):
        settings |= {"max_steps": 5, "report_to": ["tensorboard"]}
        place = settings["control"]["notice_url"].split("/")[2]
        settings["control"]["webhook_url"] = f"http://{place}/hooks/{HOOK}"
        run = oobleck.launch(settings, base_dir=runner.base_dir, local=4)
        try:
            assert run.wait().steps_committed == 5
        except RunFailed as error:
            pytest.fail(f"{error}")
        told = [text for text in seen if text is not None and text.startswith(f"{TAG}: ")]
        assert set(seen) == {HEADER, *told}
    assert told[0] == f"{TAG}: job {TAG} starts on 4 nodes"
    assert "5 steps" in told[-1], told
    events = EventAccumulator(str(runner.base_dir / TAG / "tensorboard" / "report_to")).Reload()
    assert [each.step for each in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert (runner.base_dir / ".launched").is_dir()
    assert revealing(runner.base_dir, runner.temporary) == []

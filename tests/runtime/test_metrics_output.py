"""Metrics on disk, for TensorBoard, and over HTTP: with real files and sockets."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from oobleck.control.journal import Metrics
from oobleck.errors import UsageError
from oobleck.runtime.metrics_output import MetricsAddress, MetricsOutput, parse_metrics_address, serve_metrics
from oobleck.runtime.tensorboard_file import TensorBoardFile
from tests.control.journals import run_with_a_loss
from tests.disks import fill, small_disk


def test_each_committed_step_is_a_line_and_a_new_master_goes_on_below(tmp_path):
    entries = list(run_with_a_loss(steps=10, lost_at=4))
    first = MetricsOutput(tmp_path / "metrics.jsonl", tensorboard=False)
    for entry in entries[:20]:
        first.apply(entry)
    first.close()
    past = Metrics()
    for entry in entries[:20]:
        past.apply(entry)
    second = MetricsOutput(tmp_path / "metrics.jsonl", past=past, tensorboard=False)
    for entry in entries[20:]:
        second.apply(entry)
    second.close()
    samples = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == list(range(1, 11))
    assert samples[-1]["tokens"] == 10 * 2048
    assert stat.S_IMODE((tmp_path / "metrics.jsonl").stat().st_mode) == 0o600


def test_a_disk_that_refuses_costs_the_run_nothing(tmp_path, caplog):
    output = MetricsOutput(tmp_path / "not" / "there", tensorboard=False)
    for entry in run_with_a_loss(steps=3, lost_at=1):
        output.apply(entry)
    assert output.metrics.sample(9.0).step == 3
    assert len(caplog.records) == 1


def test_samples_that_a_full_disk_did_not_take_are_written_when_there_is_room(tmp_path):
    steps = list(run_with_a_loss(steps=60, lost_at=4))
    with small_disk(tmp_path / "disk", "64k") as disk:
        output = MetricsOutput(disk / "metrics.jsonl", tensorboard=True)
        for entry in steps[:20]:
            output.apply(entry)
        filler = fill(disk)
        for entry in steps[20:]:
            output.apply(entry)
        there = (disk / "metrics.jsonl").read_text()
        assert there.endswith("\n")
        assert len(there.splitlines()) < 60
        filler.unlink()
        output.close()
        samples = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == list(range(1, 61))


def events(path: Path) -> list[Event]:
    """The events of a file, as TensorBoard itself reads them."""
    return list(EventFileLoader(str(path)).Load())


def test_tensorboard_reads_what_was_written(tmp_path):
    board = TensorBoardFile(tmp_path / "tensorboard", wall_s=1000.5, name="1")
    board.add(300, {"loss": 2.5, "goodput": 0.75, "large": -1e300}, wall_s=1001.25)
    board.close()
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.1000.*")
    head, event = events(path)
    assert (head.wall_time, head.file_version) == (1000.5, "brain.Event:2")
    assert (event.wall_time, event.step) == (1001.25, 300)
    values = {value.tag: list(value.tensor.float_val) for value in event.summary.value}
    assert values == {"loss": [2.5], "goodput": [0.75], "large": [-math.inf]}


def test_what_a_master_imports_for_tensorboard_holds_it_up_no_longer_than_its_messages_do():
    """Its plugins come with NumPy and boto3, whose import takes a second in the middle of training."""
    program = "import oobleck.runtime.tensorboard_file, sys; print('numpy' in sys.modules, 'boto3' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]


def test_a_tensorboard_that_cannot_be_imported_ends_no_run(tmp_path):
    """In a process of its own, where a broken package stands before the real one."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise ImportError('half installed')")
    program = (
        "from pathlib import Path; from tests.control.journals import run_with_a_loss;"
        "from oobleck.runtime.metrics_output import MetricsOutput; output = MetricsOutput(Path('metrics.jsonl'));"
        "[output.apply(entry) for entry in run_with_a_loss(steps=5, lost_at=2)]; output.close()"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "half installed" in ended.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_run_writes_event_files_where_it_is_to(tmp_path):
    output = MetricsOutput(tmp_path / "metrics.jsonl", tensorboard=True)
    for entry in run_with_a_loss(steps=5, lost_at=2):
        output.apply(entry)
    output.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [event.step for event in events(path)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", MetricsAddress(port=9464)),
        (":9464", MetricsAddress(port=9464)),
        ("127.0.0.1:9464", MetricsAddress(port=9464)),
        ("localhost:80", MetricsAddress(host="localhost", port=80)),
        ("[::1]:80", MetricsAddress(host="::1", port=80)),
        ("0.0.0.0:9464", MetricsAddress(host="0.0.0.0", port=9464)),
        ("[::]:80", MetricsAddress(host="::", port=80)),
        ("unix:/run/m.sock", MetricsAddress(path=Path("/run/m.sock"))),
    ],
)
def test_ports_and_sockets_are_addresses_on_loopback_unless_another_one_is_named(text, address):
    assert parse_metrics_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "0", "*:80", "example.org:80", "0.0.0.0", "10.0.0.1:99999", "::1:x", "unix:/" + "x" * 200]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="--metrics"):
        parse_metrics_address(text)


def ask(family: int, address: object, said: bytes) -> bytes:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        client.connect(address)
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := client.recv(4096):
            received += chunk
    return received


async def test_metrics_are_served_over_http_and_nonsense_is_not(tmp_path):
    path = tmp_path / "m.sock"
    asked = []

    def text() -> str:
        asked.append(1)
        return "oobleck_step_total 7\n"

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_metrics, MetricsAddress(path=path), text)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = await trio.to_thread.run_sync(ask, socket.AF_UNIX, str(path), request)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"text/plain; version=0.0.4" in head
        assert body == b"oobleck_step_total 7\n"
        assert await trio.to_thread.run_sync(ask, socket.AF_UNIX, str(path), b"GET") == b""
        assert await trio.to_thread.run_sync(ask, socket.AF_UNIX, str(path), b"x" * 8192) == b""
        assert len(asked) == 1
        listeners = await nursery.start(serve_metrics, MetricsAddress(port=0), text)
        port = listeners[0].socket.getsockname()[1]
        answer = await trio.to_thread.run_sync(ask, socket.AF_INET, ("127.0.0.1", port), request)
        assert answer.endswith(b"oobleck_step_total 7\n")
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_scraper_on_another_address_of_this_machine_reads_what_is_open_to_it():
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(serve_metrics, MetricsAddress(host="0.0.0.0", port=0), lambda: "oobleck_up 1\n")
        port = listeners[0].socket.getsockname()[1]
        answer = await trio.to_thread.run_sync(ask, socket.AF_INET, ("127.0.0.2", port), b"GET / HTTP/1.1\r\n\r\n")
        assert answer.endswith(b"oobleck_up 1\n")
        nursery.cancel_scope.cancel()


async def test_an_address_of_another_machine_is_a_usage_error_that_names_it():
    with pytest.raises(UsageError, match=r"--metrics: cannot listen on 192\.0\.2\.1:9464: Cannot assign"):
        await serve_metrics(MetricsAddress(host="192.0.2.1", port=9464), str)


async def test_an_address_that_is_taken_is_a_usage_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="--metrics"):
        await serve_metrics(MetricsAddress(port=taken.getsockname()[1]), str)

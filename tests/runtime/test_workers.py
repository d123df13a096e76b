"""Where workers cannot be started, that is said at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from oobleck.control.messages import SetUpWorker
from oobleck.errors import WorkersUnavailable
from oobleck.job import JobSpec
from oobleck.planner import Place
from oobleck.runtime.agent_dir import AgentDir
from oobleck.runtime.workers import ForkingWorkerHost

SETUP = SetUpWorker(
    job=JobSpec(),
    place=Place(node="node0", device=0),
    address="127.0.0.1",
    torch_threads=1,
    cache_dir="/nowhere",
    device_memory_bytes=1 << 30,
)


async def test_a_fork_server_that_has_ended_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = AgentDir("run", "node0")
    directory.create()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory.fork_server_socket))
        server.listen()
        host = ForkingWorkerHost(directory)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.run)
                client, _ = await trio.to_thread.run_sync(server.accept)
                client.close()
                with pytest.raises(WorkersUnavailable, match="fork server has ended"):
                    await host.start(SETUP)

"""A node's logs, as a shell there lists and reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import pytest

from oobleck.errors import UsageError
from oobleck.runtime.files import NodeLogs, agent_log, parse_list, path_in_shell
from oobleck.runtime.files.node_logs import MOST_LOG_BYTES

NODE = "node one"


def run(command: str) -> bytes:
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False).stdout


def wrote(directory: Path, name: str, data: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run's directory with a space and a quote in its name."""
    path = tmp_path / "it's here"
    wrote(path, agent_log(NODE), b"an agent\n")
    wrote(path, agent_log("node"), b"another's\n")
    return path


def test_a_node_has_its_agent_s_log_and_those_of_its_newest_ranks(directory: Path) -> None:
    logs = NodeLogs(PurePosixPath(directory), NODE)
    assert parse_list(run(logs.list())) == {"agent-node one.log": 9}
    for attempt in (2, 9, 10):
        for rank in (0, 1):
            wrote(directory, f"ranks/{NODE}/attempt_{attempt}/{rank}/stdout.log", b"x" * attempt)
            wrote(directory, f"ranks/{NODE}/attempt_{attempt}/{rank}/stderr.log", b"")
    wrote(directory, "ranks/node/attempt_11/0/stdout.log", b"another's")
    assert parse_list(run(logs.list())) == {
        "agent-node one.log": 9,
        "ranks/node one/attempt_10/0/stderr.log": 0,
        "ranks/node one/attempt_10/0/stdout.log": 10,
        "ranks/node one/attempt_10/1/stderr.log": 0,
        "ranks/node one/attempt_10/1/stdout.log": 10,
    }


def test_a_log_is_read_from_an_offset_on_and_in_parts(directory: Path) -> None:
    data = bytes(range(256)) * (MOST_LOG_BYTES // 256) + b"the end"
    wrote(directory, agent_log(NODE), data)
    logs = NodeLogs(PurePosixPath(directory), NODE)
    assert run(logs.read(agent_log(NODE), 0)) == data[:MOST_LOG_BYTES]
    assert run(logs.read(agent_log(NODE), MOST_LOG_BYTES)) == b"the end"
    assert run(logs.read(agent_log(NODE), len(data))) == b""


@pytest.mark.parametrize(
    "name", ["agent-node.log", "/etc/passwd", "../x", "ranks/node/attempt_0/0/stdout.log", "ranks/../x/stdout.log"]
)
def test_what_is_no_log_of_the_node_is_not_read(directory: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no log of node one"):
        NodeLogs(PurePosixPath(directory), NODE).read(name, 0)


def test_a_home_directory_is_that_of_the_node(directory: Path) -> None:
    assert path_in_shell(PurePosixPath("~/.oobleck/a b")) == "\"$HOME\"/'.oobleck/a b'"
    command = NodeLogs(PurePosixPath("~/it's here"), NODE).read(agent_log(NODE), 3)
    environment = {"HOME": str(directory.parent), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=True, env=environment)
    assert done.stdout == b"agent\n"

"""The requests that other processes may send to a run, their JSON, and a blocking client.

The protocol is one JSON line each way over a UNIX socket that only the run's user can reach:

    {"@type": "KillRequest", "node": "node2"}   {"ok": {...}}
                                                {"error": "usage", "message": "there is no node9"}
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from oobleck.errors import ConfigError, OobleckError, PeerError, UsageError, UserError
from oobleck.json_table import load_json, to_json
from oobleck.wire import decode_json, encode_json

from .files import RunDirectory

MAX_RESPONSE_BYTES = 16_000_000
MAX_SLOW_FACTOR = 50

_SIGNALS = ("KILL", "STOP", "CONT", "TERM")
_PROCESSES = re.compile(r"\*|agent|fork_server|worker[0-9]{1,3}")

# Subclasses come before their base, because the first that fits an error names it.
_ERRORS: Mapping[str, type[OobleckError]] = {
    "usage": UsageError,
    "config": ConfigError,
    "user": UserError,
    "peer": PeerError,
    "other": OobleckError,
}


class NoActiveRun(UsageError):
    """No process listens on the run's socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """Return the run's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRequest:
    """Kill a node's agent and workers at once, like a power failure."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """End the run: after the step in flight, or at once."""

    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowRequest:
    """Say that the script has heard of a step, and that those up to `through` may begin."""

    step: int
    through: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """Add a node, by a name that the run knows, or by a line of a hostfile."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Drain a node: it finishes the step, hands over its state, and leaves."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest:
    """Send a signal to processes of a node, to inject a fault."""

    node: str
    signal: str
    processes: str
    """`agent`, `fork_server`, `worker0` and so on, or `*` for the agent and all workers."""

    def __post_init__(self) -> None:
        if self.signal not in _SIGNALS:
            raise UsageError(f"signal {self.signal!r} is not known; it is one of {', '.join(_SIGNALS)}")
        if not _PROCESSES.fullmatch(self.processes):
            known = "*, agent, fork_server or a worker, as in worker0"
            raise UsageError(f"processes {self.processes!r} is not known; it is {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRequest:
    """Make a node's workers take `factor` times as long as usual; 1 restores their speed."""

    node: str
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= MAX_SLOW_FACTOR:
            raise UsageError(f"factor {self.factor!r} is not possible; it must be from 1 to {MAX_SLOW_FACTOR}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLogsRequest:
    """Return the size of each log of a node, by name."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogRequest:
    """Return the next part of a node's log, whose bytes are the characters of the answer's text (Latin-1)."""

    node: str
    name: str
    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise UsageError(f"offset {self.offset} is not possible; it must be at least 0")


ControlRequest = (
    StatusRequest
    | KillRequest
    | StopRequest
    | AllowRequest
    | AddRequest
    | DrainRequest
    | SignalRequest
    | SlowRequest
    | ListLogsRequest
    | ReadLogRequest
)
_REQUESTS: tuple[type[ControlRequest], ...] = get_args(ControlRequest)


def decode_request(line: bytes) -> ControlRequest:
    """Raises PeerError for anything that is not a request."""
    return decode_json(_REQUESTS, line)


def encode_error(error: OobleckError) -> bytes:
    kind = next(name for name, type_ in _ERRORS.items() if isinstance(error, type_))
    return to_json({"error": kind, "message": str(error)}).encode() + b"\n"


def request(path: Path, asked: ControlRequest, timeout_s: float = 5.0) -> dict[str, object]:
    """Send a request to the run that listens at `path`, and return its answer, within `timeout_s` seconds.

    Raises NoActiveRun if no run listens, PeerError if the answer is late or broken, and the run's own error.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with _connect(path, timeout_s) as connection:
            connection.sendall(encode_json(asked))
            line = _read_line(connection, deadline)
    except TimeoutError as error:
        raise PeerError(f"the run at {path} gave no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise PeerError(f"the run at {path} hung up: {error.strerror}") from error
    try:
        answer = load_json(line)
    except ValueError as error:
        raise PeerError(f"the run at {path} gave a broken answer") from error
    match answer:
        case {"ok": dict(result)}:
            return {str(key): value for key, value in result.items()}
        case {"error": str(kind), "message": str(message)} if kind in _ERRORS:
            raise _ERRORS[kind](message)
    raise PeerError(f"the run at {path} gave an answer that is neither a result nor an error")


def active_runs(base_dir: Path) -> tuple[RunDirectory, ...]:
    """Return the runs below `base_dir` whose master listens, sorted by tag."""
    if not base_dir.is_dir():
        return ()
    runs = (RunDirectory(base_dir=base_dir, tag=path.name) for path in sorted(base_dir.iterdir()) if path.is_dir())
    return tuple(run for run in runs if _is_listening(run.control_socket))


def find_run(base_dir: Path, tag: str | None) -> RunDirectory:
    """Return the active run with this tag, or the only one if `tag` is None. Raises NoActiveRun or UsageError."""
    if tag is not None:
        run = RunDirectory(base_dir=base_dir, tag=tag)
        if not _is_listening(run.control_socket):
            others = _listed(active_runs(base_dir))
            if run.journal.is_file():
                told = f"`oobleck events {tag}` and `oobleck report {tag}` tell what became of it"
                raise NoActiveRun(f"run {tag} is not active any more{others}; {told}")
            raise NoActiveRun(f"no run with tag {tag} is active in {base_dir}{others}")
        return run
    runs = active_runs(base_dir)
    if not runs:
        raise NoActiveRun(f"no run is active in {base_dir}; start one with `oobleck up`, or name another --base-dir")
    if len(runs) > 1:
        raise UsageError(f"{len(runs)} runs are active: name one by --tag{_listed(runs)}")
    return runs[0]


def _listed(runs: tuple[RunDirectory, ...]) -> str:
    return f" (active: {', '.join(run.tag for run in runs)})" if runs else ""


def _is_listening(path: Path) -> bool:
    try:
        _connect(path, 1.0).close()  # the file alone proves nothing, because a killed run leaves it
    except (NoActiveRun, OSError):
        return False
    return True


def _connect(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        connection.close()
        raise NoActiveRun(f"no run listens at {path}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        # The deadline is for the whole answer; a limit for each piece would let a slow run take any time.
        connection.settimeout(remaining_s)
        chunk = connection.recv(65536)
        received += chunk
        if not chunk or len(received) > MAX_RESPONSE_BYTES:
            break
    return bytes(received)

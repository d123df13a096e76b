"""The agent's process: `python -m oobleck.runtime.agent.agent_process`, started over SSH.

It binds its socket, forks into the background, and prints where to connect as one line of JSON for the waiting SSH
command. The same line stays in its directory for a master that returns (`answer_command`). If an agent of the same run
and node is running already, the line names that one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path

import trio

from oobleck import __version__
from oobleck.control.protocol import PROTOCOL_VERSION, Hello, MasterMessage, WorkerStarted
from oobleck.errors import ConfigError
from oobleck.host.hidden_log import hide_in_log
from oobleck.host.machine import this_machine
from oobleck.host.writing import write_in_place
from oobleck.job.secrets import Hiding
from oobleck.roles.agent import Agent
from oobleck.roles.agent_ports import MasterConnection
from oobleck.roles.channel import MessageChannel
from oobleck.runtime.descriptors import raise_descriptor_limit
from oobleck.runtime.files import MAX_SOCKET_PATH_BYTES, AgentDir, private_directory
from oobleck.runtime.listening import accept as accept_client
from oobleck.runtime.listening import listen_at
from oobleck.runtime.patient_clock import PatientClock
from oobleck.runtime.relay_network import RelaySockets
from oobleck.wire import FrameDecoder

from .checkpoint_store import NodeCheckpoints
from .notice import await_notice
from .rank_states import RankStates
from .ranks import RankProcesses
from .use_meter import UseMeter
from .workers import ForkingWorkerHost

_BACKLOG = 128  # for masters that look for a stopped agent, which drops all but the newest once it continues

_log = logging.getLogger("oobleck.agent")


def main() -> None:
    """Become the agent of a node in the background; the foreground process prints where, and ends."""
    arguments = _parse_arguments()
    try:
        _become_agent(arguments)
    except ConfigError as error:
        sys.exit(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"{error.filename}: {error.strerror}")


def _become_agent(arguments: argparse.Namespace) -> None:
    raise_descriptor_limit()  # the fork server and the workers inherit it
    directory = AgentDir(arguments.run, arguments.node)
    directory.create()
    answer = json.dumps({"socket": str(directory.socket), "version": __version__})
    if _answers(directory.socket):
        print(answer)  # noqa: T201  the answer
        return
    log_path = Path(arguments.log).expanduser().absolute()
    # Errors reach the master only from the foreground, so the log and the socket are opened before the fork.
    log = _open_log(log_path)
    # The socket listens before the answer is printed, so the master can connect as soon as it has read the line.
    listener = _listen(directory.socket)
    write_in_place(directory.answer, f"{answer}\n")
    # Both processes would write what is still buffered at the fork.
    sys.stdout.flush()
    if os.fork() > 0:
        print(answer)  # noqa: T201  the answer
        sys.stdout.flush()
        os._exit(0)
    _detach(log)
    directory.note_process("agent", os.getpid())
    # Another job may have started the workers' fork server in another directory, so this path must be absolute.
    cache_dir = Path(arguments.cache).expanduser().absolute()
    checkpoints = NodeCheckpoints(directory, default_directory=log_path.parent / "checkpoints")
    try:
        trio.run(_serve, arguments, directory, listener, cache_dir, log_path.parent, checkpoints, clock=PatientClock())
    finally:
        directory.remove()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the agent of one node in the background.")
    parser.add_argument("--tag", required=True, help="the job's name")
    parser.add_argument("--run", required=True, help="id that distinguishes this run from others of the same name")
    parser.add_argument("--node", required=True, help="the node's name in the job")
    parser.add_argument("--log", required=True, help="file to log to")
    parser.add_argument("--cache", required=True, help="directory for tokenizers and tokenised text")
    parser.add_argument("--ranks", action="store_true", help="run a script's ranks, and no workers")
    return parser.parse_args()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _open_log(path: Path) -> int:
    """Open the log, readable by its user only; the base directory may be shared. Raises ConfigError."""
    try:
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_directory(path.parent)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"log {path}: {error.strerror}") from error


def _listen(path: Path) -> socket.socket:
    """Listen at a path, in place of a dead agent's socket. Raises ConfigError."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{path} is too long for a socket's path; set TMPDIR there to a shorter directory")
    if not str(path).isprintable():
        raise ConfigError(f"{str(path)!r} cannot be a socket's path over SSH; set TMPDIR there to a plain directory")
    return listen_at(path, _BACKLOG)


def _detach(log: int) -> None:
    # Neither the end of the SSH session nor that of a terminal may end the agent.
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    hide_in_log(Hiding(None, os.environ))


async def _serve(
    arguments: argparse.Namespace,
    directory: AgentDir,
    listener: socket.socket,
    cache_dir: Path,
    logs: Path,
    checkpoints: NodeCheckpoints,
) -> None:
    listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))

    async def accept() -> MasterConnection:
        return MessageChannel(await accept_client(listening), FrameDecoder(MasterMessage))

    machine = this_machine()

    def hello(generation: int, living: tuple[WorkerStarted, ...]) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            oobleck_version=__version__,
            python_version=platform.python_version(),
            node=arguments.node,
            pid=os.getpid(),
            generation=generation,
            workers=living,
            num_cores=machine.num_cores,
            memory_bytes=machine.memory_bytes,
            machine=machine.identity,
            container=machine.container,
            limits=machine.limits,
            clock_s=time.monotonic(),
        )

    workers = None if arguments.ranks else ForkingWorkerHost(directory)
    agent = Agent(
        tag=arguments.tag,
        accept=accept,
        workers=workers,
        ranks=RankProcesses(directory, logs=logs / "ranks", states=RankStates(checkpoints))
        if arguments.ranks
        else None,
        hello=hello,
        cache_dir=cache_dir,
        checkpoints=None if arguments.ranks else checkpoints,
        await_notice=await_notice,
        relays=RelaySockets(),
        meter=UseMeter(machine),
    )
    async with trio.open_nursery() as nursery:
        if workers is not None:
            nursery.start_soon(workers.run)
        nursery.start_soon(_watch_for_notice, agent)
        reason = await agent.run()
        _log.info("stops: %s", reason)
        nursery.cancel_scope.cancel()


async def _watch_for_notice(agent: Agent) -> None:
    """Treat SIGTERM as notice of termination: the node asks to be drained."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            agent.request_leave("its agent was sent SIGTERM")


if __name__ == "__main__":
    main()

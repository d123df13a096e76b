"""The master of `control_plane.py` without SSH: what the control plane costs beside its tunnels.

    python tools/bench/control_master.py --nodes 256 --sockets DIR --job JOB --base-dir DIR

The coordinator, the master and its journal are those of `oobleck up`; each agent is reached by its socket at once, and
nobody looks on.
"""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.cli.inputs import JobSource, read_job
from oobleck.cli.wiring.past import read_past
from oobleck.control.protocol import FromAgent, MasterMessage
from oobleck.control.replay import RunBooks
from oobleck.control.training import Coordinator
from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.roles.channel import MessageChannel
from oobleck.roles.master import Master, RunClock
from oobleck.runtime.descriptors import raise_descriptor_limit
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import JournalWriter
from oobleck.runtime.metrics_output import MetricsOutput
from oobleck.runtime.profile_files import ProfileFiles
from oobleck.wire import FrameDecoder


class _Tunnel(MessageChannel[MasterMessage, FromAgent]):
    """The master's end of a socket."""

    address = "127.0.0.1"
    takes_calls = True

    def rest(self, is_resting: bool) -> None:
        """An idle socket costs nothing."""


class _Sockets:
    """Implements `roles.master_ports.Cluster`: agents are there already."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def reach(self, node: NodeSpec, *, attach: bool) -> _Tunnel:
        try:
            stream = await trio.open_unix_socket(self._directory / f"{node.name}.sock")
        except OSError as error:
            raise NodeUnreachable(node.name, str(error)) from error
        return _Tunnel(stream, FrameDecoder(FromAgent))

    async def kill(self, node: NodeSpec) -> bool:
        raise NodeUnreachable(node.name, "nobody can be killed through its agent's socket")

    async def clean(self, node: NodeSpec) -> None:
        await trio.lowlevel.checkpoint()


async def _run(arguments: argparse.Namespace) -> None:
    job = read_job(JobSource(file=arguments.job), num_nodes=arguments.nodes)
    directory = RunDirectory(base_dir=arguments.base_dir, tag=job.tag)
    directory.create()
    books, _ = read_past(directory.journal) if arguments.resume == "auto" else (RunBooks(), 0)
    replayed = books.finish()
    elapsed_s = 0.0 if replayed is None else replayed.last_s
    coordinator = Coordinator(
        job,
        tuple(NodeSpec(name=f"node{index}", host=f"node{index}") for index in range(arguments.nodes)),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        python_version=platform.python_version(),
        replayed=replayed,
    )
    with JournalWriter(directory.journal) as journal:
        master = Master(
            coordinator,
            job,
            cluster=_Sockets(arguments.sockets),
            journal=journal,
            profiles=ProfileFiles(directory.profile),
            clock=RunClock(elapsed_s=elapsed_s),
        )
        view, metrics = books.view, MetricsOutput(directory.metrics, past=books.metrics)
        master.observe(view.apply)
        master.observe(metrics.apply)
        master.listen(view.heard)
        await master.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--sockets", type=Path, required=True)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--base-dir", type=Path, required=True)
    parser.add_argument("--resume", choices=("auto", "never"), default="never", help="auto: take a run over")
    raise_descriptor_limit()
    trio.run(_run, parser.parse_args())


if __name__ == "__main__":
    main()

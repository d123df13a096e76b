"""The processes of `control_plane.py`: agents, SSH servers, and the master that is measured."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from oobleck import __version__
from oobleck.control.journal import PlanAdopted
from oobleck.errors import ConfigError
from oobleck.planner import (
    Planner,
    PlannerSettings,
    Profile,
    device_sheet,
    estimate_profile,
    model_shape,
    profile_to_json,
)
from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.runtime.journals import read_journal
from tools.bench.control_servers import Reach, serve_embedded, serve_openssh

__all__ = ["Agents", "Cluster", "Master", "run_master", "serve_agents", "serve_ssh"]

_TAG = "control-plane"
_MICROBATCHES_EACH = 8
"""Of each pipeline."""
_TIMEOUT_S = 300.0
_END_S = 30.0
_HERE = Path(__file__).parent
_JOB = """\
tag: {tag}
data: {{sequence_length: 1024}}
global_batch_size: {batch}
microbatch_size: 2
num_pipelines: {pipelines}
max_steps: 1000000
control: {{heartbeat_interval_s: {interval_s}, lease_s: {lease_s}, start_timeout_s: 3600, {relays}}}
checkpoint: {{enabled: false}}
"""
_STAND_IN = """\
#!/bin/sh
# In place of the interpreter that starts an agent: the agent is there already.
while [ $# -gt 0 ]; do
  case "$1" in --node) node="$2" ;; esac
  shift
done
printf '{{"socket": "{sockets}/%s.sock", "version": "{version}"}}\\n' "$node"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is measured."""

    agents: int
    pipelines: int
    step_s: float
    interval_s: float
    lease_s: float
    tunnels: str
    has_dashboard: bool = False
    relay_fanout: int = 0
    """So many agents speak through one; 0: all speak to the master."""
    is_idle: bool = False
    """Agents start no workers: they are heard, and no more."""


class Agents:
    """The process of the agents."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def counts(self) -> Counter[str]:
        assert self._process.stdout is not None
        self._command("counts")
        return Counter(json.loads(self._process.stdout.readline()))

    def lose(self, node: str) -> None:
        self._command(f"lose {node}")

    def leave_notes(self, cluster: Cluster, directory: Path) -> None:
        """Write down on each node what its agent would have, for a master that looks for it."""
        run_id = RunDirectory(base_dir=directory / "base", tag=_TAG).run_id
        for index in range(cluster.agents):
            noted = directory / f"oobleck-{os.getuid()}" / run_id / f"node{index}"
            noted.mkdir(parents=True, exist_ok=True)
            (noted / "agent.pid").write_text(str(ProcessId.of(self._process.pid)))
            answer = {"socket": str(directory / f"node{index}.sock"), "version": __version__}
            (noted / "agent.json").write_text(json.dumps(answer))

    def _command(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()


class Master:
    """The process of the master, and its journal."""

    def __init__(self, process: subprocess.Popen[bytes], journal: Path) -> None:
        self._process = process
        self._journal = journal

    @property
    def processor_s(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_mib(self) -> float:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not happened():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the master ended, or there was no {what} within {_TIMEOUT_S:g} s")
            time.sleep(0.05)

    @property
    def num_training(self) -> int:
        """Nodes of the newest plan."""
        with suppress(ConfigError):  # it has no journal yet
            plans = [entry.plan for entry in read_journal(self._journal) if isinstance(entry, PlanAdopted)]
            return len(plans[-1].nodes) if plans else 0
        return 0

    def kill(self) -> None:
        """End it as a machine's power does."""
        self._process.kill()
        self._process.wait()

    def entries(self, kind: str) -> list[dict[str, object]]:
        """The entries of a kind that its journal has so far."""
        with suppress(FileNotFoundError):
            lines = self._journal.read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines if line.startswith(f'{{"@type":"{kind}"')]
        return []


@contextmanager
def serve_agents(cluster: Cluster, directory: Path) -> Iterator[Agents]:
    profile = directory / "profile.json"
    profile.write_text(profile_to_json(_profile(cluster)), encoding="utf-8")
    command = [sys.executable, str(_HERE / "control_agents.py"), "--nodes", str(cluster.agents)]
    command += ["--directory", str(directory), "--profile", str(profile), "--tag", _TAG]
    command += ["--idle"] if cluster.is_idle else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            agents = Agents(process)
            agents.counts()  # it answers once all listen
            yield agents
        finally:
            process.kill()


def _profile(cluster: Cluster) -> Profile:
    """GPT-2 medium's on an A40, made as slow or fast as the step is to be."""
    profile = estimate_profile(model_shape("gpt2-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024)
    settings = PlannerSettings(
        num_microbatches=_MICROBATCHES_EACH * cluster.pipelines, num_pipelines=cluster.pipelines, devices_per_node=1
    )
    for _ in range(3):  # what goes over the network stays as it is, so once is not enough
        factor = cluster.step_s / Planner(profile, settings).step_s(
            [f"node{number}" for number in range(cluster.agents)]
        )
        layers = tuple(
            replace(
                layer,
                forward_s={number: factor * each_s for number, each_s in layer.forward_s.items()},
                backward_s={number: factor * each_s for number, each_s in layer.backward_s.items()},
            )
            for layer in profile.layers
        )
        profile = replace(profile, layers=layers)
    return profile


@contextmanager
def serve_ssh(cluster: Cluster, directory: Path) -> Iterator[Reach | None]:
    match cluster.tunnels:
        case "embedded":
            with serve_embedded(cluster.agents, directory) as reach:
                yield reach
        case "openssh":
            with serve_openssh(cluster.agents, directory) as reach:
                yield reach
        case _:
            yield None


@contextmanager
def run_master(cluster: Cluster, directory: Path, reach: Reach | None, *, takes_over: bool = False) -> Iterator[Master]:
    """Run a master; one that takes over finds the agents of another that was killed."""
    job = directory / "job.yaml"
    job.write_text(
        _JOB.format(
            tag=_TAG,
            batch=2 * _MICROBATCHES_EACH * cluster.pipelines,
            pipelines=cluster.pipelines,
            interval_s=cluster.interval_s,
            lease_s=cluster.lease_s,
            relays=f"relay_nodes: 1, relay_fanout: {cluster.relay_fanout}"
            if cluster.relay_fanout
            else "relay_nodes: 0",
        )
    )
    base_dir = directory / "base"
    command = _plain_command(cluster, directory) if reach is None else _up_command(cluster, directory, reach)
    command += ["--job", str(job), "--base-dir", str(base_dir), "--resume", "auto" if takes_over else "never"]
    with _terminal(cluster) as output, (directory / "errors").open("wb") as errors:
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"}
        environment.pop("SSH_AUTH_SOCK", None)  # keys of one's own would be tried as well
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
        ) as process:
            try:
                yield Master(process, base_dir / _TAG / "journal.jsonl")
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            except BaseException:
                sys.stderr.write((directory / "errors").read_text(errors="replace"))
                raise
            finally:
                process.kill()


def _plain_command(cluster: Cluster, directory: Path) -> list[str]:
    return [
        sys.executable, str(_HERE / "control_master.py"), "--nodes", str(cluster.agents), "--sockets", str(directory)
    ]  # fmt: skip


def _up_command(cluster: Cluster, directory: Path, reach: Reach) -> list[str]:
    stand_in = directory / "python"
    stand_in.write_text(_STAND_IN.format(sockets=directory, version=__version__))
    stand_in.chmod(0o700)
    return [
        *(sys.executable, "-m", "oobleck", "up", str(reach.hostfile), "--ssh-config", str(reach.config)),
        *("--python", str(stand_in), "--no-check"),
        *([] if cluster.has_dashboard else ["--plain"]),
    ]


@contextmanager
def _terminal(cluster: Cluster) -> Iterator[int]:
    """Where the master writes: a terminal that somebody reads, or nowhere."""
    if not cluster.has_dashboard:
        yield subprocess.DEVNULL
        return
    reader, writer = pty.openpty()
    threading.Thread(target=_drain, args=(reader,), daemon=True).start()
    try:
        yield writer
    finally:
        os.close(writer)


def _drain(descriptor: int) -> None:
    with suppress(OSError):  # the other end is closed
        while os.read(descriptor, 1 << 16):
            pass
    os.close(descriptor)

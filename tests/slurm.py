"""A real Slurm cluster on loopback: one slurmctld, and a slurmd for each of its nodes, which are all this machine.

Slurm's programs are Debian's, installed or unpacked: nothing of the host is changed, and no munge and no cgroup are
needed. Unpacked ones find their libraries through the loader: LD_LIBRARY_PATH would reach the tasks, and Python there.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[1]
ROOT = Path(os.environ.get("OOBLECK_SLURM_ROOT", REPOSITORY / ".slurm"))
"""Where Debian's packages are unpacked, if they are not installed: `.ci/run` does it."""

_LOADER = "/lib64/ld-linux-x86-64.so.2"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_CLIENTS = ("srun", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_FORK_SERVER = "oobleck.training.process.worker_server"
"""Of this machine, and so of all nodes, whichever has started it; the workers that it forks look like it."""
_START_S = 30.0
_END_S = 60.0

_CONFIG = """\
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
SlurmctldTimeout=10
KillWait=5
InactiveLimit=0
StateSaveLocation={run}/state
SlurmctldPidFile={run}/slurmctld.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdSpoolDir={run}/spool.%n
SlurmdPidFile={run}/slurmd.%n.pid
SlurmdLogFile={run}/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,defer_batch=0
NodeName=n[1-{count}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def _program(name: str) -> Path | None:
    """A program of Slurm's; Debian gives some of them a suffix."""
    for directory in (ROOT / "usr/bin", ROOT / "usr/sbin"):
        for found in (directory / f"{name}-wlm", directory / name):
            if found.exists():
                return found
    for each in (f"{name}-wlm", name):
        if (path := shutil.which(each, path=f"{os.environ.get('PATH', '')}:/usr/sbin")) is not None:
            return Path(path)
    return None


def why_no_slurm() -> str | None:
    """Why no cluster can be started here; None when one can."""
    missing = [name for name in _DAEMONS if _program(name) is None]
    missing += [name for name in _CLIENTS if _program(name) is None]
    return f"there is no {missing[0]}, installed or below {ROOT}" if missing else None


needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))


@dataclass(frozen=True)
class Slurm:
    """A cluster under way."""

    directory: Path
    count: int

    @property
    def environment(self) -> dict[str, str]:
        """What its commands need."""
        path = f"{self.directory / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait_for_end(self, job: str) -> None:
        """Wait until a job has left the queue."""
        deadline_s = time.monotonic() + _END_S
        while (
            self.run("squeue", "--noheader", "--states", "PENDING,RUNNING,COMPLETING", "--format", "%A")
            .split()
            .count(job)
        ):
            assert time.monotonic() < deadline_s, self.run("squeue")
            time.sleep(0.2)

    def power_off(self, node: str) -> None:
        """Kill a node's slurmd, and the steps and tasks on it, but for workers: nobody sees whose they are."""
        tasks = [each for each in psutil.process_iter() if _is_task_on(node, each)]
        daemon = psutil.Process(int((self.directory / f"slurmd.{node}.pid").read_text()))
        steps = {parent for each in tasks if (parent := each.parent()) and "slurmstepd" in parent.name()}
        for process in [daemon, *steps, *tasks]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def power_on(self, node: str) -> None:
        """Start a node's slurmd; the first time, or again before Slurm has learned that it was off."""
        (self.directory / f"spool.{node}").mkdir(exist_ok=True)
        self.run("slurmd", "-N", node, "-d", str(self.directory / "bin" / "slurmstepd"))


def _is_task_on(node: str, process: psutil.Process) -> bool:
    try:
        return process.environ().get("SLURMD_NODENAME") == node and _FORK_SERVER not in process.cmdline()
    except psutil.Error:
        return False


@contextmanager
def serve_slurm(directory: Path, count: int) -> Iterator[Slurm]:
    """Serve a cluster of nodes n1, n2, … until the context ends."""
    (directory / "bin").mkdir(parents=True)
    (directory / "state").mkdir()
    for name in (*_CLIENTS, *_DAEMONS):
        _wrap(name, directory / "bin" / name)
    slurm = Slurm(directory, count)
    _configure(slurm)
    daemons = [slurm.directory / "slurmctld.pid"]
    try:
        slurm.run("slurmctld")
        for index in range(1, count + 1):
            slurm.power_on(f"n{index}")
            daemons.append(directory / f"slurmd.n{index}.pid")
        _wait_for_nodes(slurm)
        yield slurm
    finally:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            slurm.run("scancel", "--full", "--signal=KILL", "--user", str(os.getuid()))
        for path in daemons:
            with suppress(OSError, ValueError, psutil.NoSuchProcess):
                psutil.Process(int(path.read_text())).kill()


def _wrap(name: str, path: Path) -> None:
    program = _program(name)
    assert program is not None
    text = f'#!/bin/sh\nexec {program} "$@"\n'
    if program.is_relative_to(ROOT):
        libraries = f"{ROOT / _LIBRARIES / 'slurm-wlm'}:{ROOT / _LIBRARIES}"
        text = f'#!/bin/sh\nexec {_LOADER} --library-path {libraries} {program} "$@"\n'
    path.write_text(text)
    path.chmod(0o700)


def _configure(slurm: Slurm) -> None:
    plugins = Path("/") / _LIBRARIES / "slurm-wlm"
    if (program := _program("slurmd")) is not None and program.is_relative_to(ROOT):
        plugins = ROOT / _LIBRARIES / "slurm-wlm"
    ports = _free_ports(slurm.count + 1)
    text = _CONFIG.format(
        host=socket.gethostname().partition(".")[0],
        user=psutil.Process().username(),
        port=ports[0],
        first=ports[1],
        last=ports[-1],
        plugins=plugins,
        run=slurm.directory,
        count=slurm.count,
    )
    (slurm.directory / "slurm.conf").write_text(text)


def _free_ports(count: int) -> range:
    """Ports one after the other that nobody listens on now."""
    for first in range(20_000, 30_000, 50):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return range(first, first + count)
    raise AssertionError("no ports are free")


def _wait_for_nodes(slurm: Slurm) -> None:
    deadline_s = time.monotonic() + _START_S
    while slurm.run("sinfo", "--noheader", "--format", "%D %t") != f"{slurm.count} idle":
        assert time.monotonic() < deadline_s, slurm.run("sinfo")
        time.sleep(0.1)

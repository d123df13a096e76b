"""Nodes that Slurm has given: `srun` starts `oobleck node` on each, and they dial in.

The tasks of a step that was started with --no-kill outlive other nodes of their job, and the `srun` that started them.
So neither a lost node nor a lost master ends them. Slurm is asked which nodes there are; it learns of deaths after
half a minute, and is never asked for those.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import trio

from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.python_process import module_command

from .command import printed_by
from .dial_in import DialedInNodes

__all__ = ["SlurmJobs", "SlurmTasks"]

_TIMEOUT_S = 30.0
_AGAIN_S = 30.0
_JOB_ID = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobs:
    """The jobs whose nodes a run has: one, or all that run under a name."""

    job_id: str | None = None
    name: str | None = None

    @classmethod
    def of_allocation(cls) -> SlurmJobs:
        """The job that this process is in. Raises UsageError."""
        job_id = os.environ.get("SLURM_JOB_ID", "")
        if not _JOB_ID.fullmatch(job_id):
            raise UsageError(
                "--slurm: this is no allocation of Slurm's (SLURM_JOB_ID is not set); run it in a batch script or "
                "below salloc, or name a job that runs by --slurm-job"
            )
        return cls(job_id=job_id)

    def __str__(self) -> str:
        return f"Slurm's job {self.job_id}" if self.job_id is not None else f"Slurm's jobs of the name {self.name}"

    async def nodes(self) -> dict[str, tuple[str, ...]]:
        """The nodes of each job that runs. Raises ConfigError."""
        which = ["--jobs", self.job_id] if self.job_id is not None else ["--name", self.name or ""]
        listed = await _ask("squeue", "--noheader", *which, "--states", "RUNNING", "--format", "%A %N")
        found: dict[str, tuple[str, ...]] = {}
        for line in listed.splitlines():
            job_id, _, nodes = line.strip().partition(" ")
            if not _JOB_ID.fullmatch(job_id) or not nodes:
                raise ConfigError(f"squeue printed {line!r}, which is no job and its nodes")
            found[job_id] = tuple((await _ask("scontrol", "show", "hostnames", nodes)).split())
        if not found:
            raise ConfigError(
                f"{self}: none runs, by what squeue says; see `squeue --me` for the names of those that do"
            )
        return found


class SlurmTasks:
    """Keeps an `oobleck node` on every node of the jobs."""

    def __init__(
        self,
        jobs: SlurmJobs,
        file: Path,
        *,
        log: Path,
        callers: DialedInNodes,
        interval_s: float = 5.0,
        first_s: float = 3.0,
    ) -> None:
        """`file` is what nodes need, and `log` receives what they and srun say.

        For `first_s` nothing is started: nodes that a master before has started look for this one every two seconds.
        """
        self._jobs = jobs
        self._file = file
        self._log = log
        self._callers = callers
        self._interval_s = interval_s
        self._first_s = first_s
        self._again_s: dict[tuple[str, str], float] = {}
        """When a node of a job may be started again that was started before."""

    async def run(self) -> None:
        """Ask which nodes there are, again and again, and start what is missing."""
        await trio.sleep(self._first_s)
        said = ""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    jobs = await self._jobs.nodes()
                except ConfigError as error:
                    if str(error) != said:
                        said = str(error)
                        self._callers.report(
                            f"no more nodes are looked for: {error}; the run continues with those that it has"
                        )
                else:
                    said = ""
                    for job_id, nodes in sorted(jobs.items()):
                        if missing := self._missing(job_id, nodes):
                            nursery.start_soon(self._start, job_id, missing)
                await trio.sleep(self._interval_s)

    def _missing(self, job_id: str, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Those to start now: none that has left the job, and none too soon that may have died without Slurm's notice.

        Another job gives a node again that was given back under the one before.
        """
        here = {node.name for node in self._callers.nodes}
        here |= {node for node, grant in self._callers.released.items() if grant in ("", job_id)}
        now_s = trio.current_time()
        missing = tuple(node for node in nodes if node not in here and self._again_s.get((job_id, node), 0) <= now_s)
        self._again_s.update({(job_id, node): now_s + _AGAIN_S for node in missing})
        return missing

    async def _start(self, job_id: str, nodes: tuple[str, ...]) -> None:
        """Start `oobleck node` on nodes of a job, and wait for its end: of all of them, or of srun alone."""
        count = str(len(nodes))
        step = ["srun", "--jobid", job_id, "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--input", "none"]
        where = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(nodes)]
        task = module_command("oobleck", "node", str(self._file))
        try:
            with self._log.open("ab") as log:
                process = await trio.lowlevel.open_process(
                    [*step, *where, *task],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the master, and a master that is killed leaves it alone
                )
            await process.wait()
        except OSError as error:
            self._callers.report(f"srun cannot be started: {error.strerror}")


async def _ask(*words: str) -> str:
    """What one of Slurm's commands prints. Raises ConfigError."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"there is no {words[0]} here; is this machine part of a Slurm cluster?")
    return await printed_by(shlex.join(words), named=f"Slurm's {words[0]}", timeout_s=_TIMEOUT_S)

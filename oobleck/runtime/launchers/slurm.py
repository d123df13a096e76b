"""Nodes that Slurm has allocated: `srun` starts `oobleck node` on each, and they dial in.

Slurm lists the nodes but does not report deaths, which it learns after half a minute.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import trio

from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.python_process import module_command

from .command import printed_by
from .dial_in import DialedInNodes

_TIMEOUT_S = 30.0
_AGAIN_S = 30.0
_NOTICE_S = 60.0
_NOTICE_SHARE = 0.25  # of the time limit, so that a job of a minute or two does some work before its notice
_JOB_ID = re.compile(r"[0-9]+")
_LISTED = "%i %A %L %l %N"
# It matches a job, a component of a heterogeneous job, or a task of an array.
_ID = re.compile(r"(?P<leader>[0-9]+)(\+(?P<component>[0-9]+)|_[0-9]+)?")
_DURATION = re.compile(r"((?P<days>[0-9]+)-)?((?P<hours>[0-9]+):)?(?P<minutes>[0-9]+):(?P<seconds>[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmAllocation:
    """The nodes of a running job, or of one component of a heterogeneous job."""

    shown_id: str
    """The id that users write: 17, 17_3 in an array, 17+1 in a heterogeneous job."""
    job_id: str
    component: str | None = None
    nodes: tuple[str, ...]
    limit_s: float = math.inf
    left_s: float = math.inf

    @property
    def notice_s(self) -> float:
        """How long before its time limit the nodes get notice."""
        return min(_NOTICE_S, _NOTICE_SHARE * self.limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobs:
    """The jobs whose nodes a run uses: one job, or all running jobs of a name."""

    job_id: str | None = None
    name: str | None = None

    @classmethod
    def of_allocation(cls) -> SlurmJobs:
        """Return the job of this process. Raises UsageError."""
        job_id = os.environ.get("SLURM_JOB_ID", "")
        if not _JOB_ID.fullmatch(job_id):
            raise UsageError(
                "--slurm: this is not inside a Slurm allocation (SLURM_JOB_ID is not set); run it in a batch script or "
                "below salloc, or name a running job with --slurm-job"
            )
        return cls(job_id=job_id)

    def __str__(self) -> str:
        return f"Slurm's job {self.job_id}" if self.job_id is not None else f"Slurm's jobs of the name {self.name}"

    async def allocations(self) -> tuple[SlurmAllocation, ...]:
        """Ask Slurm for the allocations of the running jobs. Raises ConfigError."""
        which = ["--jobs", self.job_id] if self.job_id is not None else ["--name", self.name or ""]
        listed = await _ask("squeue", "--noheader", *which, "--states", "RUNNING", "--format", _LISTED)
        running = [await _allocation(line) for line in listed.splitlines()]
        # An array's id is also the id of one of its tasks, but squeue lists all tasks for it.
        running = [each for each in running if self.job_id in (None, each.job_id)]
        if not running:
            raise ConfigError(
                f"{self}: not running, according to squeue; `squeue --me` lists your jobs and their names"
            )
        return tuple(running)


async def _allocation(line: str) -> SlurmAllocation:
    """Parse a line of squeue. Raises ConfigError."""
    match line.split():
        case [shown_id, job_id, left, limit, nodes] if (id_ := _ID.fullmatch(shown_id)) and _JOB_ID.fullmatch(job_id):
            component = id_["component"]
            return SlurmAllocation(
                shown_id=shown_id,
                job_id=job_id if component is None else id_["leader"],
                component=component,
                nodes=tuple((await _ask("scontrol", "show", "hostnames", nodes)).split()),
                limit_s=_seconds(limit),
                left_s=_seconds(left),
            )
    raise ConfigError(f"squeue printed {line!r}, which is not a job and its nodes")


def _seconds(text: str) -> float:
    """Parse a duration of Slurm's; infinite if there is no limit."""
    if (parts := _DURATION.fullmatch(text)) is None:
        return math.inf
    days, hours, minutes, seconds = (int(parts[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((24.0 * days + hours) * 60 + minutes) * 60 + seconds


@dataclass(eq=False, kw_only=True)
class SlurmTasks:
    """Keeps an `oobleck node` on every node of the jobs."""

    jobs: SlurmJobs
    file: Path
    """The nodes' keys."""
    log: Path
    """Receives the output of the nodes and of srun."""
    callers: DialedInNodes
    interval_s: float = 5.0
    # Nodes of an earlier master look for this one every two seconds; they must not be started a second time.
    first_s: float = 3.0
    # It says when a node of a job may be started again, keyed by job and node.
    _again_s: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    _limited: set[str] = field(default_factory=set, init=False)  # jobs whose time limit was reported
    _noticed: set[str] = field(default_factory=set, init=False)  # jobs that have had notice

    async def run(self) -> None:
        """Ask Slurm for the nodes and start missing ones, until cancelled."""
        await trio.sleep(self.first_s)
        problem = ""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    jobs = await self.jobs.allocations()
                except ConfigError as error:
                    if str(error) != problem:
                        problem = str(error)
                        self.callers.report(
                            f"no more nodes are looked for: {error}; the run continues with those that it has"
                        )
                else:
                    problem = ""
                    for job in jobs:
                        # Without a notice, Slurm would end the batch script first, and nothing would be saved.
                        if job.left_s <= job.notice_s:
                            await self._give_notice(job)
                        elif missing := self._missing(job):
                            nursery.start_soon(self._start, job, missing)
                            self._report_limit(job)
                await trio.sleep(self.interval_s)

    def _report_limit(self, job: SlurmAllocation) -> None:
        if job.limit_s < math.inf and job.shown_id not in self._limited:
            self._limited.add(job.shown_id)
            self.callers.report(
                f"Slurm's job {job.shown_id} reaches its time limit in {job.left_s / 60:.0f} min; its nodes get "
                f"notice {job.notice_s:.0f} s before, or earlier if sbatch is given --signal TERM@SECONDS",
                level="info",
            )

    async def _give_notice(self, job: SlurmAllocation) -> None:
        """Signal all tasks of a job once that its time limit is near, as Slurm does with --signal."""
        if job.shown_id in self._noticed:
            return
        self._noticed.add(job.shown_id)
        self.callers.report(f"Slurm's job {job.shown_id} reaches its time limit in {job.left_s:.0f} s")
        try:
            # Unlike the plain number, this id names one allocation alone.
            await _ask("scancel", "--signal", "TERM", job.shown_id)
        except ConfigError as error:
            self.callers.report(f"its nodes get no notice: {error}")

    def _missing(self, job: SlurmAllocation) -> tuple[str, ...]:
        # A node that was given back under one job may be allocated again by another.
        here = {node.name for node in self.callers.nodes}
        here |= {node for node, grant in self.callers.released.items() if grant in ("", job.job_id)}
        now_s = trio.current_time()
        # Slurm may not know yet that a node is dead, so none is started again too soon.
        again_s = {node: self._again_s.get((job.job_id, node), 0.0) for node in job.nodes}
        missing = tuple(node for node in job.nodes if node not in here and again_s[node] <= now_s)
        self._again_s.update({(job.job_id, node): now_s + _AGAIN_S for node in missing})
        return missing

    async def _start(self, job: SlurmAllocation, nodes: tuple[str, ...]) -> None:
        """Start `oobleck node` on nodes of a job, and wait until srun ends."""
        count = str(len(nodes))
        # The tasks of a --no-kill step outlive the other nodes of their job and the `srun` that started them, so
        # neither a lost node nor a lost master ends them.
        step = ["srun", "--jobid", job.job_id, "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--input", "none"]
        step += [] if job.component is None else ["--het-group", job.component]
        where = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(nodes)]
        task = module_command("oobleck", "node", str(self.file))
        try:
            with self.log.open("ab") as log:
                process = await trio.lowlevel.open_process(
                    [*step, *where, *task],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # neither Ctrl-C nor a killed master may end it
                )
            await process.wait()
        except OSError as error:
            self.callers.report(f"srun cannot be started: {error.filename}: {error.strerror}")


async def _ask(*words: str) -> str:
    """Return what one of Slurm's commands prints. Raises ConfigError."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"there is no {words[0]} here; is this machine part of a Slurm cluster?")
    return await printed_by(shlex.join(words), named=f"Slurm's {words[0]}", timeout_s=_TIMEOUT_S)

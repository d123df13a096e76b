"""What Slurm's commands say, played by stand-ins; tests/e2e/test_slurm.py has the real ones."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest
import trio

from oobleck.cli.inputs import parse_hostfile
from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.launchers import DialedInNodes, NodeChange, Reported, SlurmAllocation, SlurmJobs, SlurmTasks
from tests.runtime.ssh_servers import until

SQUEUE = 'printf x >>squeue.calls; case "$*" in'
SQUEUE += ' *"--jobs 17 "*|*"--name mine "*) cat queue ;; *) echo "Invalid job id" >&2; exit 1 ;; esac'
SCONTROL = "case $3 in 'n[1-2]') echo n1; echo n2 ;; n7) echo n7 ;; *) exit 1 ;; esac"
SCANCEL = 'echo "$*" >>scancel.calls'
NO_LIMIT = "UNLIMITED UNLIMITED"
SRUN = 'echo $$ >>srun.pids; echo "$*" >>srun.calls'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with stand-ins for Slurm's commands, and the queue that they know."""
    for name, body in {"squeue": SQUEUE, "scontrol": SCONTROL, "srun": SRUN, "scancel": SCANCEL}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "queue").write_text(f"17 17 {NO_LIMIT} n[1-2]\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


async def srun_has_ended(cluster: Path) -> None:
    """Wait for the stand-ins that were started: who starts them leaves them alone when it is cancelled."""
    pids = (cluster / "srun.pids").read_text().split()
    await until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


async def test_the_nodes_of_a_job_and_of_all_jobs_of_a_name(cluster: Path) -> None:
    first = SlurmAllocation(shown_id="17", job_id="17", nodes=("n1", "n2"))
    assert await SlurmJobs(job_id="17").allocations() == (first,)
    (cluster / "queue").write_text(f"17 17 {NO_LIMIT} n[1-2]\n18 18 {NO_LIMIT} n7\n")
    second = SlurmAllocation(shown_id="18", job_id="18", nodes=("n7",))
    assert await SlurmJobs(name="mine").allocations() == (first, second)


async def test_a_task_whose_id_is_also_its_arrays_has_its_own_nodes_alone(cluster: Path) -> None:
    """Slurm gives one task the array's id, and lists all tasks by it."""
    (cluster / "queue").write_text(f"17_1 17 {NO_LIMIT} n7\n17_0 18 {NO_LIMIT} n[1-2]\n")
    assert await SlurmJobs(job_id="17").allocations() == (SlurmAllocation(shown_id="17_1", job_id="17", nodes=("n7",)),)


async def test_a_heterogeneous_job_has_the_nodes_of_all_its_components(cluster: Path) -> None:
    (cluster / "queue").write_text(f"17+0 17 {NO_LIMIT} n7\n17+1 18 {NO_LIMIT} n[1-2]\n")
    assert await SlurmJobs(job_id="17").allocations() == (
        SlurmAllocation(shown_id="17+0", job_id="17", component="0", nodes=("n7",)),
        SlurmAllocation(shown_id="17+1", job_id="17", component="1", nodes=("n1", "n2")),
    )


@pytest.mark.parametrize(
    ("shown", "expected_s"),
    [("0:59", 59.0), ("10:00", 600.0), ("1:00:00", 3600.0), ("2-03:04:05", 183845.0), ("INVALID", math.inf)],
)
async def test_time_limits_are_read_as_slurm_writes_them(shown: str, expected_s: float, cluster: Path) -> None:
    (cluster / "queue").write_text(f"17 17 {shown} {shown} n7\n")
    (job,) = await SlurmJobs(job_id="17").allocations()
    assert (job.left_s, job.limit_s) == (expected_s, expected_s)


@pytest.mark.parametrize(
    ("jobs", "queue", "problem"),
    [
        (SlurmJobs(job_id="99"), "", "squeue failed with exit status 1: Invalid job id"),
        (SlurmJobs(job_id="17"), "", "Slurm's job 17: not running"),
        (SlurmJobs(name="mine"), "", "Slurm's jobs of the name mine: not running"),
        (SlurmJobs(name="mine"), "maintenance until noon\n", "squeue printed 'maintenance until noon'"),
        (SlurmJobs(name="mine"), f"17 17 {NO_LIMIT} n9\n", "scontrol failed with exit status 1"),
    ],
)
async def test_what_cannot_be_used_is_named(jobs: SlurmJobs, queue: str, problem: str, cluster: Path) -> None:
    (cluster / "queue").write_text(queue)
    with pytest.raises(ConfigError) as raised:
        await jobs.allocations()
    assert problem in str(raised.value)


async def test_where_there_is_no_slurm_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no squeue here; is this machine part of a Slurm cluster"):
        await SlurmJobs(job_id="17").allocations()


def test_outside_of_an_allocation_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="not inside a Slurm allocation"):
        SlurmJobs.of_allocation()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert SlurmJobs.of_allocation() == SlurmJobs(job_id="17")


async def test_nodes_are_started_once_and_new_ones_when_they_are_listed(cluster: Path, nursery: trio.Nursery) -> None:
    callers = DialedInNodes(num_first=1, parse=parse_hostfile, patience_s=1)
    told: list[NodeChange] = []

    async def follow() -> None:
        reported, changes = trio.open_memory_channel[NodeChange](10)
        async with trio.open_nursery() as following:
            following.start_soon(callers.follow, reported)
            told.append(await changes.receive())

    def calls() -> list[str]:
        path = cluster / "srun.calls"
        return path.read_text().splitlines() if path.exists() else []

    jobs, log = SlurmJobs(name="mine"), cluster / "log"
    tasks = SlurmTasks(jobs=jobs, file=cluster / "node.json", log=log, callers=callers, interval_s=0.05, first_s=0)
    nursery.start_soon(follow)
    nursery.start_soon(tasks.run)
    await until(calls)
    (cluster / "queue").write_text(f"17 17 {NO_LIMIT} n[1-2]\n18+1 19 {NO_LIMIT} n7\n")
    await until(lambda: len(calls()) == 2)
    (cluster / "queue").write_text("")
    await until(lambda: told)
    (report,) = told
    assert isinstance(report, Reported)
    assert "not running" in report.text
    assert [call.partition(" --overlap")[0] for call in calls()] == ["--jobid 17", "--jobid 18"]
    assert "--no-kill" in calls()[0]
    assert ["--het-group 1" in call for call in calls()] == [False, True]
    assert calls()[0].endswith(f"--nodelist n1,n2 {sys.executable} -P -m oobleck node {cluster / 'node.json'}")
    assert shutil.which("srun") == str(cluster / "srun")
    await srun_has_ended(cluster)


async def test_a_node_that_was_given_back_is_started_again_under_another_job_alone(
    cluster: Path, nursery: trio.Nursery
) -> None:
    (cluster / "queue").write_text(f"17 17 {NO_LIMIT} n[1-2]\n")
    callers = DialedInNodes(num_first=1, parse=parse_hostfile, patience_s=1)
    callers.released["n1"] = "17"
    path = cluster / "srun.calls"

    def nodes() -> list[tuple[str, str]]:
        calls = path.read_text().splitlines() if path.exists() else []
        words = [call.split() for call in calls]
        return [(call[call.index("--jobid") + 1], call[call.index("--nodelist") + 1]) for call in words]

    jobs, log = SlurmJobs(name="mine"), cluster / "log"
    tasks = SlurmTasks(jobs=jobs, file=cluster / "node.json", log=log, callers=callers, interval_s=0.05, first_s=0)
    nursery.start_soon(tasks.run)
    await until(nodes)
    assert nodes() == [("17", "n2")]
    (cluster / "queue").write_text(f"18 18 {NO_LIMIT} n[1-2]\n")
    await until(lambda: len(nodes()) == 2)
    assert nodes()[1] == ("18", "n1,n2")
    await srun_has_ended(cluster)


async def followed(callers: DialedInNodes, texts: list[str]) -> None:
    """Keep what people are to read."""
    reported, changes = trio.open_memory_channel[NodeChange](10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.follow, reported)
        async for change in changes:
            assert isinstance(change, Reported)
            texts.append(change.text)


@pytest.mark.parametrize("shown", ["17", "17_1", "17+0"])
async def test_nodes_get_notice_once_before_their_time_limit_and_users_know_it_from_the_start(
    shown: str, cluster: Path, nursery: trio.Nursery
) -> None:
    callers = DialedInNodes(num_first=1, parse=parse_hostfile, patience_s=1)
    texts: list[str] = []
    path = cluster / "scancel.calls"
    (cluster / "queue").write_text(f"{shown} 17 59:10 1:00:00 n7\n")
    tasks = SlurmTasks(
        jobs=SlurmJobs(name="mine"),
        file=cluster / "node.json",
        log=cluster / "log",
        callers=callers,
        interval_s=0.05,
        first_s=0,
    )
    nursery.start_soon(followed, callers, texts)
    nursery.start_soon(tasks.run)
    await until(lambda: texts)
    assert f"job {shown} reaches its time limit in 59 min; its nodes get notice 60 s before" in texts[0]
    assert not path.exists()
    (cluster / "queue").write_text(f"{shown} 17 0:58 1:00:00 n7\n")
    await until(path.exists)
    asked_again = len((cluster / "squeue.calls").read_text())
    await until(lambda: len((cluster / "squeue.calls").read_text()) > asked_again + 1)
    assert path.read_text() == f"--signal TERM {shown}\n"
    assert texts[1:] == [f"Slurm's job {shown} reaches its time limit in 58 s"]
    await srun_has_ended(cluster)


def test_a_short_job_works_for_most_of_its_time_before_its_notice() -> None:
    job = SlurmAllocation(shown_id="17", job_id="17", nodes=(), limit_s=60.0, left_s=60.0)
    assert job.notice_s == 15.0

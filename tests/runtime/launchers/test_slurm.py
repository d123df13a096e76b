"""What Slurm's commands say, played by stand-ins; tests/e2e/test_slurm.py has the real ones."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import trio

from oobleck.cli.inputs import parse_hostfile
from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.launchers import DialedInNodes, NodeChange, Reported, SlurmJobs, SlurmTasks
from tests.runtime.ssh_servers import until

SQUEUE = 'case "$*" in *"--jobs 17 "*|*"--name mine "*) cat queue ;; *) echo "Invalid job id" >&2; exit 1 ;; esac'
SCONTROL = "case $3 in 'n[1-2]') echo n1; echo n2 ;; n7) echo n7 ;; *) exit 1 ;; esac"
SRUN = 'echo $$ >>srun.pids; echo "$*" >>srun.calls'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with stand-ins for Slurm's commands, and the queue that they know."""
    for name, body in {"squeue": SQUEUE, "scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "queue").write_text("17 n[1-2]\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


async def srun_has_ended(cluster: Path) -> None:
    """Wait for the stand-ins that were started: who starts them leaves them alone when it is cancelled."""
    pids = (cluster / "srun.pids").read_text().split()
    await until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


async def test_the_nodes_of_a_job_and_of_all_jobs_of_a_name(cluster: Path) -> None:
    assert await SlurmJobs(job_id="17").nodes() == {"17": ("n1", "n2")}
    (cluster / "queue").write_text("17 n[1-2]\n18 n7\n")
    assert await SlurmJobs(name="mine").nodes() == {"17": ("n1", "n2"), "18": ("n7",)}


@pytest.mark.parametrize(
    ("jobs", "queue", "problem"),
    [
        (SlurmJobs(job_id="99"), "", "squeue failed with exit status 1: Invalid job id"),
        (SlurmJobs(job_id="17"), "", "Slurm's job 17: none runs"),
        (SlurmJobs(name="mine"), "", "Slurm's jobs of the name mine: none runs"),
        (SlurmJobs(name="mine"), "maintenance until noon\n", "squeue printed 'maintenance until noon'"),
        (SlurmJobs(name="mine"), "17 n9\n", "scontrol failed with exit status 1"),
    ],
)
async def test_what_cannot_be_used_is_named(jobs: SlurmJobs, queue: str, problem: str, cluster: Path) -> None:
    (cluster / "queue").write_text(queue)
    with pytest.raises(ConfigError) as raised:
        await jobs.nodes()
    assert problem in str(raised.value)


async def test_where_there_is_no_slurm_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no squeue here; is this machine part of a Slurm cluster"):
        await SlurmJobs(job_id="17").nodes()


def test_outside_of_an_allocation_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="no allocation of Slurm's"):
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
    tasks = SlurmTasks(jobs, cluster / "node.json", log=log, callers=callers, interval_s=0.05, first_s=0)
    nursery.start_soon(follow)
    nursery.start_soon(tasks.run)
    await until(calls)
    (cluster / "queue").write_text("17 n[1-2]\n18 n7\n")
    await until(lambda: len(calls()) == 2)
    (cluster / "queue").write_text("")
    await until(lambda: told)
    (report,) = told
    assert isinstance(report, Reported)
    assert "none runs" in report.text
    assert [call.partition(" --overlap")[0] for call in calls()] == ["--jobid 17", "--jobid 18"]
    assert "--no-kill" in calls()[0]
    assert calls()[0].endswith(f"--nodelist n1,n2 {sys.executable} -P -m oobleck node {cluster / 'node.json'}")
    assert shutil.which("srun") == str(cluster / "srun")
    await srun_has_ended(cluster)


async def test_a_node_that_was_given_back_is_started_again_under_another_job_alone(
    cluster: Path, nursery: trio.Nursery
) -> None:
    (cluster / "queue").write_text("17 n[1-2]\n")
    callers = DialedInNodes(num_first=1, parse=parse_hostfile, patience_s=1)
    callers.released["n1"] = "17"
    path = cluster / "srun.calls"

    def nodes() -> list[tuple[str, str]]:
        calls = path.read_text().splitlines() if path.exists() else []
        words = [call.split() for call in calls]
        return [(call[call.index("--jobid") + 1], call[call.index("--nodelist") + 1]) for call in words]

    jobs, log = SlurmJobs(name="mine"), cluster / "log"
    tasks = SlurmTasks(jobs, cluster / "node.json", log=log, callers=callers, interval_s=0.05, first_s=0)
    nursery.start_soon(tasks.run)
    await until(nodes)
    assert nodes() == [("17", "n2")]
    (cluster / "queue").write_text("18 n[1-2]\n")
    await until(lambda: len(nodes()) == 2)
    assert nodes()[1] == ("18", "n1,n2")
    await srun_has_ended(cluster)

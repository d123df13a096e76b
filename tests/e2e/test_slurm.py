"""Training on the nodes of a real Slurm cluster: they are lost and added, and time limits and killed masters come."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from oobleck.errors import ExitCode
from oobleck.runtime.launchers import SlurmJobs
from tests.processes import words_of
from tests.slurm import Slurm, needs_slurm, serve_slurm

from .elastic import (
    ENDLESS,
    PACED,
    TOLERANCE,
    Reference,
    assert_all_is_right,
    nodes_of,
    recoveries,
    recoveries_in,
    stopped,
)
from .harness import TAG, Runner, Up, oobleck, started_at, worker_pids

pytestmark = needs_slurm

SCRIPT = """\
#!/bin/sh
{command}
code=$?
echo "oobleck up has ended with $code"
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
[ $code -ne 75 ] || scontrol requeue "$job"
exit $code
"""
TAKEN_OVER = """\
#!/bin/sh
until {command}
do
    [ $? -eq 137 ] || exit
done
"""
"""Of a batch job whose master may be killed: the same line takes over."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with serve_slurm(tmp_path_factory.mktemp("slurm") / "cluster", 4) as slurm:
        yield slurm


@contextmanager
def batch_job(
    runner: Runner, slurm: Slurm, directory: Path, *asked: str, script: str = SCRIPT
) -> Iterator[tuple[str, Up]]:
    """Submit a script with `oobleck up --slurm` on three nodes; yields the job's id, and what it says.

    `asked` is what Slurm is asked for on top.
    """
    summary, output, path = (directory / name for name in ("summary.json", "output", "script"))
    where = ("--slurm", "--dial-in", "127.0.0.1:0", PACED, "--base-dir", str(runner.base_dir))
    options = (*given(runner), "--plain", "--summary", str(summary))
    path.write_text(script.format(command=shlex.join([sys.executable, "-m", "oobleck", "up", *where, *options])))
    output.touch()
    exported = {"TMPDIR": str(runner.temporary), "HOME": str(home(runner, directory))}
    environment = ",".join(["ALL", *(f"{name}={value}" for name, value in exported.items())])
    submit = ["sbatch", "--parsable", "--nodes", "3", "--no-kill", "--requeue", "--open-mode", "append", *asked]
    job = slurm.run(*submit, "--output", str(output), "--export", environment, str(path))
    tail = subprocess.Popen(["tail", "-n", "+1", "-F", str(output)], stdout=subprocess.PIPE, text=True)
    try:
        yield job, Up(tail, summary)
    finally:
        tail.kill()
        tail.communicate()
        with suppress(AssertionError):  # it has ended
            slurm.run("scancel", "--full", "--signal", "KILL", job)


def given(runner: Runner) -> tuple[str, ...]:
    """The job of every run here."""
    job = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--no-check")
    return (*job, "--set", "checkpoint.enabled=true")


def home(runner: Runner, directory: Path) -> Path:
    """A home in which nodes keep logs and checkpoints where other runs do."""
    (directory / ".oobleck").symlink_to(runner.base_dir)
    return directory


@pytest.mark.slow
def test_nodes_lost_and_back_cost_no_step_and_a_requeued_job_goes_on_from_the_very_step(
    runner: Runner, endless_reference: Reference, slurm: Slurm, tmp_path: Path
) -> None:
    with batch_job(runner, slurm, tmp_path) as (job, up):
        up.wait_for_step(5)
        power_off(runner, slurm, "n3")
        slurm.power_on("n3")  # before Slurm misses it, which would take it out of the job
        up.wait_for_loss("n3")
        up.wait_for("n3 taken in; ")
        up.wait_for_steps(5)
        assert [(cause, lost) for cause, _, lost in recoveries_in(runner.journal())] == [
            ("connection_lost", ("n3",)),
            ("joined", ("n3",)),
        ]
        slurm.run("scancel", "--signal", "TERM", job)  # as Slurm does before a time limit, if it is asked to
        first, second = continued(runner, slurm, job, up)
    assert runner.left_over() == []
    assert_equal_to(endless_reference, first, second)


@pytest.mark.timeout(900)
@pytest.mark.slow  # Slurm counts time limits in minutes, and looks after them twice in one
@pytest.mark.parametrize("asked", [(), ("--signal", "TERM@60")], ids=["by itself", "by Slurm"])
def test_a_job_that_reaches_its_time_limit_is_requeued_and_goes_on_from_the_very_step(
    asked: tuple[str, ...], runner: Runner, endless_reference: Reference, slurm: Slurm, tmp_path: Path
) -> None:
    with batch_job(runner, slurm, tmp_path, "--time", "2", *asked) as (job, up):
        first, second = continued(runner, slurm, job, up)
    assert runner.left_over() == []
    assert_equal_to(endless_reference, first, second)


@pytest.mark.slow
def test_jobs_that_slurm_lists_together_are_told_apart(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slurm.environment["PATH"])
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    asked = ("--parsable", "--exclusive", "--output", str(tmp_path / "out"), "--wrap", "sleep 600")
    array = slurm.run("sbatch", "--nodes", "2", "--array", "0-1", *asked)
    try:
        listed = wait_for_running(slurm, 2)
        assert array in listed.values(), "one of the tasks has the id of all"
        found = {shown: trio.run(SlurmJobs(job_id=job_id).allocations) for shown, job_id in listed.items()}
        assert all([job.shown_id for job in jobs] == [shown] for shown, jobs in found.items()), found
        assert sorted(node for jobs in found.values() for node in jobs[0].nodes) == ["n1", "n2", "n3", "n4"]
    finally:
        slurm.run("scancel", "--full", array)
        slurm.wait_for_end(array)
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nsleep 600\n")
    job = slurm.run("sbatch", *asked[:-2], "--nodes", "1", ":", "--nodes", "2", "--exclusive", str(script))
    try:
        wait_for_running(slurm, 2)
        components = trio.run(SlurmJobs(job_id=job).allocations)
        assert [(each.job_id, each.component, len(each.nodes)) for each in components] == [(job, "0", 1), (job, "1", 2)]
    finally:
        slurm.run("scancel", "--full", job)
        slurm.wait_for_end(job)


def wait_for_running(slurm: Slurm, count: int) -> dict[str, str]:
    """Wait until so many jobs run; returns how Slurm shows each, and its number."""
    deadline_s = time.monotonic() + 60.0
    while True:
        listed = slurm.run("squeue", "--noheader", "--states", "RUNNING", "--format", "%i %A").splitlines()
        if len(listed) == count:
            return dict(map(str.split, listed))
        assert time.monotonic() < deadline_s, slurm.run("squeue")
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("asked", "components"),
    [
        (("--array", "0-1", "--nodes", "2"), ()),
        (("--nodes", "1"), (":", "--nodes", "2", "--exclusive")),
    ],
    ids=["array", "heterogeneous"],
)
def test_each_task_of_an_array_trains_on_its_own_nodes_and_a_heterogeneous_job_on_all_of_its(
    asked: tuple[str, ...], components: tuple[str, ...], runner: Runner, slurm: Slurm, tmp_path: Path
) -> None:
    where = ("--slurm", "--dial-in", "127.0.0.1:0", PACED, "--base-dir", str(runner.base_dir))
    command = shlex.join([sys.executable, "-m", "oobleck", "up", *where, *given(runner), "--plain"])
    script = tmp_path / "script"
    script.write_text(SCRIPT.format(command=f"{command} --set tag={TAG}$SLURM_ARRAY_TASK_ID"))
    exported = f"ALL,TMPDIR={runner.temporary},HOME={home(runner, tmp_path)}"
    options = ("--parsable", "--exclusive", "--no-kill", "--output", str(tmp_path / "%A.%a"), "--export", exported)
    job = slurm.run("sbatch", *options, *asked, *components, str(script))
    tags = [TAG] if components else [f"{TAG}0", f"{TAG}1"]
    try:
        trained_on = [wait_for_nodes(runner.base_dir / tag / "journal.jsonl") for tag in tags]
        assert [len(nodes) for nodes in trained_on] == ([3] if components else [2, 2])
        assert len(set().union(*trained_on)) == sum(map(len, trained_on)), "no node is in two runs"
        for tag in tags:
            assert oobleck("stop", tag, "--base-dir", str(runner.base_dir)).returncode == 0
        slurm.wait_for_end(job)
    finally:
        with suppress(AssertionError):  # it has ended
            slurm.run("scancel", "--full", "--signal", "KILL", job)
    assert runner.left_over() == []


def wait_for_nodes(journal: Path) -> set[str]:
    """Wait until a run has committed some steps; returns the nodes that it has had by then."""
    deadline_s = time.monotonic() + 240.0
    while True:
        entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        if sum(entry["@type"] == "StepDone" for entry in entries) >= 20:
            return {entry["node"] for entry in entries if entry["@type"] == "NodeConnected"}
        assert time.monotonic() < deadline_s, [entry["@type"] for entry in entries]
        time.sleep(0.5)


@pytest.mark.slow
def test_in_a_batch_job_the_same_line_takes_over_from_a_killed_master(
    runner: Runner, endless_reference: Reference, slurm: Slurm, tmp_path: Path
) -> None:
    with batch_job(runner, slurm, tmp_path, script=TAKEN_OVER) as (job, up):
        up.wait_for_step(5)
        workers = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
        kill_master(runner)
        up.wait_for("a new master takes over")
        up.wait_for_steps(5)
        assert workers == {node: started_at(pid) for node, pid in worker_pids(runner).items()}
        stop_job(runner, slurm, job)
        trained = steps(runner)
    assert runner.left_over() == []
    assert min(trained) == 1
    assert_equal_to(endless_reference, trained)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outside_has_the_nodes_of_all_jobs_of_a_name_as_they_come_and_go(
    runner: Runner, endless_reference: Reference, slurm: Slurm, tmp_path: Path
) -> None:
    variables = {"PATH": slurm.environment["PATH"], "SLURM_CONF": slurm.environment["SLURM_CONF"]}
    variables["HOME"] = str(home(runner, tmp_path))
    outside = ["env", *(f"{name}={value}" for name, value in variables.items())]
    where = ("--slurm-job", "llama", "--dial-in", "127.0.0.1:0", PACED)
    with jobs_of_name(slurm, tmp_path, "llama") as submit:
        alpha, _ = submit("n1"), submit("n2")
        with runner.up(*given(runner), nodes=where, within=outside) as first:
            first.wait_for_step(5)
            submit("n3")
            first.wait_for("n3 taken in; ")
            slurm.run("scancel", "--signal", "TERM", alpha)
            first.wait_for("n1 has left")
            slurm.run("scancel", "--full", alpha)
            slurm.wait_for_end(alpha)
            first.wait_for_steps(3)
            submit("n1")  # another job on the machine that was given back
            first.wait_for("n1 taken in; ")
            power_off(runner, slurm, "n3")
            first.wait_for_loss("n3")
            first.wait_for_steps(3)
            workers = {node: started_at(pid) for node, pid in worker_pids(runner).items() if node != "n3"}
            first.process.kill()
            first.process.wait()
            with runner.up(*given(runner), nodes=where, within=outside) as second:
                second.wait_for_steps(5)
                submit("n4")
                second.wait_for("n4 taken in; ")
                second.wait_for_steps(3)
                now = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
                assert {node: now[node] for node in workers} == workers
                outcome = stopped(runner, second)
        slurm.power_on("n3")
    assert_all_is_right(outcome, endless_reference)
    assert [(cause, lost) for cause, _, lost in recoveries(outcome)] == [
        ("joined", ("n3",)),
        ("drained", ("n1",)),
        ("joined", ("n1",)),
        ("connection_lost", ("n3",)),
        ("joined", ("n4",)),
    ]
    assert nodes_of(outcome) == ["n1", "n2", "n4"]
    assert runner.left_over() == []


@pytest.mark.slow
def test_the_nodes_of_all_jobs_of_a_name_are_checked_from_outside(runner: Runner, slurm: Slurm, tmp_path: Path) -> None:
    with jobs_of_name(slurm, tmp_path, "probe") as submit:
        submit("n1")
        submit("n2")
        asked = ("--slurm-job", "probe", "--dial-in", "127.0.0.1:0", "--slow-factor", "1000", "--json")
        command = [sys.executable, "-m", "oobleck", "check", *asked, "--base-dir", str(runner.base_dir)]
        environment = {**slurm.environment, "TMPDIR": str(runner.temporary), "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        nodes = [node["verdict"]["node"] for node in json.loads(done.stdout)["nodes"]]
        assert sorted(nodes) == ["n1", "n2"]


@contextmanager
def jobs_of_name(slurm: Slurm, directory: Path, name: str) -> Iterator[Callable[[str], str]]:
    """Yields what submits a job of this name, which holds a node and does nothing, and returns its id once it runs."""
    asked = ("--parsable", "--exclusive", "--no-kill", "--job-name", name, "--chdir", str(directory))
    listed = ("squeue", "--noheader", "--states", "RUNNING", "--name", name, "--format", "%A")

    def submit(node: str) -> str:
        job = slurm.run("sbatch", *asked, "--nodelist", node, "--output", str(directory / "out"), "--wrap", "sleep 600")
        deadline_s = time.monotonic() + 60.0
        while job not in slurm.run(*listed).split():
            assert time.monotonic() < deadline_s, slurm.run("squeue")
            time.sleep(0.2)
        jobs.append(job)
        return job

    jobs: list[str] = []
    try:
        yield submit
    finally:
        with suppress(AssertionError):  # some have ended
            slurm.run("scancel", "--full", *jobs)
        for job in jobs:
            slurm.wait_for_end(job)


def power_off(runner: Runner, slurm: Slurm, node: str) -> None:
    """Cut a node's power, and what its memory held is gone."""
    slurm.power_off(node)
    runner.signal(node)
    for left in (runner.agent_directory(node), runner.memory / node):
        shutil.rmtree(left, ignore_errors=True)


def kill_master(runner: Runner) -> None:
    """Kill the `oobleck up` of a batch job."""
    masters = [process for process in runner.processes() if words_of(process)[1:4] == ["-m", "oobleck", "up"]]
    assert len(masters) == 1, masters
    masters[0].kill()


def continued(runner: Runner, slurm: Slurm, job: str, up: Up) -> tuple[dict[int, float], dict[int, float]]:
    """Have a job have notice and be requeued, and stop it then; the steps before and after, and their losses."""
    up.wait_for("all nodes are to be taken away")
    up.wait_for(f"has ended with {ExitCode.RESUMABLE:d}")
    first = steps(runner)
    up.wait_for("] step ")
    assert recoveries_in(runner.journal()) == []
    up.wait_for_steps(5)
    stop_job(runner, slurm, job)
    second = steps(runner)
    assert min(second) == max(first) + 1, "from the very step"
    return first, second


def stop_job(runner: Runner, slurm: Slurm, job: str) -> None:
    done = oobleck("stop", TAG, "--base-dir", str(runner.base_dir))
    assert done.returncode == 0, done.stderr
    slurm.wait_for_end(job)


def steps(runner: Runner) -> dict[int, float]:
    """The steps of the newest run, each committed once and none left out, and their losses."""
    entries = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    losses = {entry["step"]: entry["loss"] for entry in entries}
    assert list(losses) == list(range(min(losses), min(losses) + len(entries)))
    return losses


def assert_equal_to(reference: Reference, *parts: dict[int, float]) -> None:
    """Compare losses of steps with those of one process."""
    losses = {step: loss for part in parts for step, loss in part.items()}
    expected = reference(max(losses))
    assert max(abs(loss - expected[step - 1]) for step, loss in losses.items()) < TOLERANCE

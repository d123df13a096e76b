"""Training on the nodes of a real Slurm cluster: a node is lost, all have notice together, and the job is requeued."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.slurm import Slurm, needs_slurm, serve_slurm

from .elastic import ENDLESS, PACED, TOLERANCE, Reference, recoveries_in
from .harness import TAG, Runner, Up, oobleck

pytestmark = needs_slurm

SCRIPT = """\
#!/bin/sh
{command}
code=$?
[ $code -ne 75 ] || scontrol requeue $SLURM_JOB_ID
exit $code
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with serve_slurm(tmp_path_factory.mktemp("slurm") / "cluster", 4) as slurm:
        yield slurm


@contextmanager
def batch_job(runner: Runner, slurm: Slurm, directory: Path, *options: str) -> Iterator[tuple[str, Up]]:
    """Submit a script with `oobleck up --slurm` on three nodes; yields the job's id, and what it says."""
    summary, output, script = (directory / name for name in ("summary.json", "output", "script"))
    where = ("--slurm", "--dial-in", "127.0.0.1:0", PACED, "--base-dir", str(runner.base_dir))
    command = [sys.executable, "-m", "oobleck", "up", *where, "--plain", "--summary", str(summary), *options]
    script.write_text(SCRIPT.format(command=shlex.join(command)))
    output.touch()
    (directory / ".oobleck").symlink_to(runner.base_dir)  # nodes keep logs and checkpoints where other runs do
    exported = {"TMPDIR": str(runner.temporary), "HOME": str(directory)}
    environment = ",".join(["ALL", *(f"{name}={value}" for name, value in exported.items())])
    submit = ["sbatch", "--parsable", "--nodes", "3", "--no-kill", "--requeue", "--open-mode", "append"]
    job = slurm.run(*submit, "--output", str(output), "--export", environment, str(script))
    tail = subprocess.Popen(["tail", "-n", "+1", "-F", str(output)], stdout=subprocess.PIPE, text=True)
    try:
        yield job, Up(tail, summary)
    finally:
        tail.kill()
        tail.communicate()
        with suppress(AssertionError):  # it has ended
            slurm.run("scancel", "--full", "--signal", "KILL", job)


def test_a_lost_node_costs_no_step_and_a_requeued_job_goes_on_from_the_very_step(
    runner: Runner, endless_reference: Reference, slurm: Slurm, tmp_path: Path
) -> None:
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--no-check", "--set", "checkpoint.enabled=true")
    with batch_job(runner, slurm, tmp_path, *given) as (job, up):
        up.wait_for_step(5)
        slurm.power_off("n3")
        runner.signal("n3")
        up.wait_for("n3 lost; ")
        for left in (runner.agent_directory("n3"), runner.memory / "n3"):
            shutil.rmtree(left, ignore_errors=True)  # of a machine that does not come back
        up.wait_for_steps(5)
        slurm.run("scancel", "--signal", "TERM", job)  # as Slurm does before a time limit, if it is asked to
        up.wait_for("all nodes are to be taken away")
        first = steps(runner)
        up.wait_for("] step ")
        assert recoveries_in(runner.journal()) == []
        up.wait_for_steps(5)
        done = oobleck("stop", TAG, "--base-dir", str(runner.base_dir))
        assert done.returncode == 0, done.stderr
        slurm.wait_for_end(job)
        second = steps(runner)
    assert runner.left_over() == []
    assert min(second) == max(first) + 1, "from the very step"
    expected = endless_reference(max(second))
    assert max(abs(loss - expected[step - 1]) for step, loss in {**first, **second}.items()) < TOLERANCE


@pytest.mark.slow
def test_the_nodes_of_all_jobs_of_a_name_are_checked_from_outside(runner: Runner, slurm: Slurm, tmp_path: Path) -> None:
    submit = [
        "sbatch",
        "--parsable",
        "--exclusive",
        "--no-kill",
        "--job-name",
        "probe",
        "--output",
        str(tmp_path / "out"),
        "--chdir",
    ]
    jobs = [slurm.run(*submit, str(tmp_path), "--wrap", "sleep 300") for _ in range(2)]
    listed = ("squeue", "--noheader", "--states", "RUNNING", "--name", "probe", "--format", "%A")
    try:
        while sorted(slurm.run(*listed).split()) != sorted(jobs):
            time.sleep(0.2)
        asked = ("--slurm-job", "probe", "--dial-in", "127.0.0.1:0", "--slow-factor", "1000", "--json")
        command = [sys.executable, "-m", "oobleck", "check", *asked, "--base-dir", str(runner.base_dir)]
        environment = {**slurm.environment, "TMPDIR": str(runner.temporary), "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        nodes = [node["verdict"]["node"] for node in json.loads(done.stdout)["nodes"]]
        assert len(nodes) == len(set(nodes)) == 2
    finally:
        slurm.run("scancel", "--full", *jobs)


def steps(runner: Runner) -> dict[int, float]:
    """The steps of the newest run, and their losses."""
    entries = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    return {entry["step"]: entry["loss"] for entry in entries}

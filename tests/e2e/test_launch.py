"""Runs that are started, watched and ended from Python."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import oobleck
from oobleck.control.journal import RunState
from oobleck.errors import ExitCode, RunFailed, UsageError

from .harness import RUN_TIMEOUT_S, TAG, Outcome, Runner
from .paced_job import optimizer

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"

PAGE = HERE.parents[1] / "docs" / "python.md"
TRAIN = """
from oobleck import Job

def job():
    model = {"type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2}
    return Job(model=model, max_steps=40, sequence_length=16, global_batch_size=8, per_device_train_batch_size=2)
"""

Launch = Callable[..., oobleck.Run]


@pytest.fixture
def launch(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """`oobleck.launch` with the harness's directories; no run is left."""
    monkeypatch.setenv("TMPDIR", str(runner.temporary))
    runs: list[oobleck.Run] = []

    def start(job: object, **options: Any) -> oobleck.Run:
        runs.append(oobleck.launch(job, **{"base_dir": runner.base_dir, "local": 4, **options}))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for run in runs:
        run.stop(now=True)
        run.__exit__(None, None, None)
    assert runner.left_over() == []


@pytest.fixture
def settings(runner: Runner) -> dict[str, Any]:
    """The GPT-2 job's, without its optimizer's own."""
    read: dict[str, Any] = yaml.safe_load(runner.job_file().read_text())
    own = read.pop("optimizer")
    return {**read, **own}


@pytest.mark.slow
def test_a_node_killed_from_python_costs_no_step(
    launch: Launch, runner: Runner, settings: dict[str, Any], undisturbed: Outcome
) -> None:
    path = runner.directory / "launched.json"
    run = launch(oobleck.Job(optimizer=optimizer, **settings), summary=path)
    events = []
    for event in run:
        events.append(event)
        if event.kind == "StepDone" and event.entry.record.step == 6:
            assert run.status().state == RunState.TRAINING
            with pytest.raises(UsageError, match="there is no node 'node9'"):
                run.kill("node9")
            run.kill("node3")
    summary = run.wait()
    assert (summary.steps_committed, summary.steps_lost) == (24, 0)
    assert [recovery.nodes for recovery in summary.recoveries] == [("node3",)]
    assert list(summary.losses) == pytest.approx(undisturbed.losses, rel=1e-9)
    assert json.loads(path.read_text()) == json.loads(summary.to_json())
    assert [str(event) for event in events[:1]] == [f"job {TAG} starts on 4 nodes"]
    assert str(events[-1]) == "all 24 steps are committed"
    assert list(run) == events
    assert (run.status().state, run.status().step, run.is_active) == (RunState.DONE, 24, False)
    with pytest.raises(UsageError, match="has ended"):
        run.kill("node2")


@pytest.mark.slow
def test_a_block_ends_its_run_and_what_it_has_saved_is_continued(launch: Launch, settings: dict[str, Any]) -> None:
    endless = {**settings, "max_steps": 100_000, "checkpoint": {"enabled": True}}
    with launch(oobleck.Job(optimizer=optimizer, **endless)) as run:
        for event in run:
            if event.kind == "StepDone" and event.entry.record.step >= 3:
                break
        assert run.is_active
    assert not run.is_active
    first = run.wait()
    assert first.exit_code == 0
    assert first.saved_step == first.last_step >= 3
    again = launch(oobleck.Job(optimizer=optimizer, **endless))
    next(event for event in again if event.kind == "StepDone")
    again.stop()
    assert again.wait().begun_after == first.last_step


@pytest.mark.slow
def test_a_bug_in_the_model_is_raised_with_its_traceback(launch: Launch, tmp_path: Path) -> None:
    run = launch(HERE / "failing_job.py", arguments=[str(tmp_path)], tag=TAG, steps=100_000)
    # A save that the bug cuts off would stay in memory, because no disk has it.
    next(event for event in run if event.kind == "CheckpointSaved")
    (tmp_path / "all").write_text("exception")
    with pytest.raises(RunFailed, match="the model has a bug") as raised:
        run.wait()
    assert "failing_job.py" in raised.value.traceback
    assert raised.value.traceback.strip().endswith("ValueError: the model has a bug")
    assert raised.value.exit_code == ExitCode.FAILED


@pytest.mark.slow
def test_two_runs_at_once_have_their_own_tags(launch: Launch, settings: dict[str, Any]) -> None:
    jobs = [{**settings, "tag": tag, "max_steps": 100_000} for tag in (TAG, "other")]
    runs = [launch(oobleck.Job(optimizer=optimizer, **job), local=2) for job in jobs]
    for run in runs:
        next(event for event in run if event.kind == "StepDone")
    with pytest.raises(UsageError, match=f"a run with tag {TAG} is active"):
        launch(oobleck.Job(optimizer=optimizer, **jobs[0]))
    assert [run.status().tag for run in runs] == [TAG, "other"]
    runs[0].stop()
    assert runs[0].wait().exit_code == 0
    assert runs[1].is_active
    runs[1].stop(now=True)
    assert runs[1].wait().tag == "other"


def _example(runner: Runner, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "launch.py"), "--tag", TAG, "--base-dir", str(runner.base_dir)]
    return subprocess.Popen([*command, *arguments], env=runner.environment, stdout=subprocess.PIPE, text=True)


def _last_saved(runner: Runner) -> int:
    return max(entry["step"] for entry in runner.journal() if entry["@type"] == "CheckpointSaved")


def _last_committed(runner: Runner) -> int:
    return max(entry["record"]["step"] for entry in runner.journal() if entry["@type"] == "StepDone")


@pytest.mark.slow
def test_the_example(runner: Runner) -> None:
    """`launch.py`: it kills a node of its run, and no step is lost."""
    with _example(runner, "--steps", "60") as process:
        said, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0
    assert "node2 lost; " in said
    assert "60 steps, 0 lost" in said
    assert runner.left_over() == []


@pytest.mark.slow
def test_a_killed_program_leaves_a_saved_state_and_nothing_else(runner: Runner) -> None:
    with _example(runner, "--steps", "100000", "--kill-at", "100000") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5 "):
                break
        process.kill()
    assert runner.left_over(timeout_s=60.0) == []
    *_, end = runner.journal()
    assert end["exit_code"] == ExitCode.TERMINATED
    assert _last_saved(runner) == _last_committed(runner) >= 5


@pytest.mark.slow
def test_ctrl_c_saves_stops_and_is_raised(runner: Runner) -> None:
    with _example(runner, "--steps", "100000", "--kill-at", "100000") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5 "):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == -signal.SIGINT, "as a program ends that does not catch KeyboardInterrupt"
    assert "steps, " not in rest
    assert runner.left_over() == []
    *_, end = runner.journal()
    # In the loop's body it is the end of the `with` block too, which stops the run as well; either may come first.
    assert end["exit_code"] in (ExitCode.DONE, ExitCode.INTERRUPTED)
    assert _last_saved(runner) == _last_committed(runner) >= 5


def _page() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_what_the_page_shows_runs(runner: Runner, tmp_path: Path) -> None:
    first, program, loop = _page()
    (tmp_path / "train.py").write_text(TRAIN)
    code = first.replace('hosts="hosts.txt"', f'local=2, tag="{TAG}"')
    code = code.replace(
        "for event in run:\n    print(event)\n", loop.replace("== 20", "== 3").replace("node2", "node1")
    )
    assert code.count("\n") > 8
    assert code != first
    (tmp_path / "first.py").write_text(code)
    (tmp_path / "program.py").write_text(program.replace("local=4", f'local=2, tag="{TAG}", steps=5'))
    environment = {**runner.environment, "OOBLECK_BASE_DIR": str(runner.base_dir)}
    for name, said in (("first.py", "40 0 "), ("program.py", "")):
        command = [sys.executable, name]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert runner.journal()[-1]["exit_code"] == 0
        runner.forget_checkpoints()

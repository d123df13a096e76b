"""The process of a script's callbacks: told of everything, able to stop the run, and unable to hurt it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from oobleck.cli.inputs import JobSource, open_job
from oobleck.cli.main import main
from oobleck.control.journal import Notice
from oobleck.errors import ConfigError
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.processes.script_process import CallbackProcess, describe_script
from oobleck.runtime.python_process import module_command
from tests.control.journals import committed
from tests.processes import all_to_end, noted_by

SLOW = pytest.mark.slow  # each starts a process that imports torch and transformers

STOPS_AT_TWO = """
from oobleck import Job

class Stopper:
    def on_step_end(self, args, state, control, **kwargs):
        print("heard of step", state.global_step)
        control.should_training_stop = state.global_step == 2

class Broken:
    def on_step_end(self, args, state, control, **kwargs):
        raise ValueError("no route to the tracker")

def job():
    return Job(callbacks=[Broken(), Stopper()])
"""


def job_of(source: str) -> JobSpec:
    return JobSpec(script=ScriptSpec(name="train.py", source=source, directory="/nowhere", provides=("callbacks",)))


async def test_a_callback_hears_of_every_step_and_may_stop_the_run_and_one_that_raises_is_reported_once(tmp_path: Path):
    stopped, said = trio.Event(), []
    log = tmp_path / "script.log"
    process = CallbackProcess(job_of(STOPS_AT_TWO), log=log, on_stop=stopped.set, report=said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        process.tell(committed(1.0, 1))
        process.tell(committed(2.0, 2))
        with trio.fail_after(120):
            await stopped.wait()
        process.tell(committed(3.0, 3))
        await process.finish()
    lines = log.read_text().splitlines()
    assert [line for line in lines if line.startswith("heard")] == [f"heard of step {number}" for number in (1, 2, 3)]
    assert lines.count("ValueError: no route to the tracker") == 3
    assert said == [f"the callback Broken.on_step_end failed: ValueError: no route to the tracker; see {log}"]


@pytest.mark.slow
async def test_a_script_that_ends_its_process_ends_nothing_else(tmp_path: Path):
    log = tmp_path / "script.log"
    source = "import os\nprint('about to go', flush=True)\nos._exit(7)"
    said: list[str] = []
    process = CallbackProcess(job_of(source), log=log, on_stop=lambda: None, report=said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        with trio.fail_after(120):
            for number in range(1, 4):
                process.tell(committed(float(number), number))
            await process.finish()
        process.tell(committed(4.0, 4))
    assert log.read_text() == "about to go\n"
    assert set(said) <= {f"the script's callbacks have ended; see {log}"}, "a few entries fit a pipe nobody reads"


@pytest.mark.slow
async def test_what_callbacks_have_forked_holds_no_end_up(tmp_path: Path):
    log = tmp_path / "script.log"
    source = "import os, time\nchild = os.fork()\ntime.sleep(0 if child else 60)\nprint(child, flush=True)\nos._exit(7)"
    process = CallbackProcess(job_of(source), log=log, on_stop=lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        with trio.fail_after(120):
            while not (log.exists() and log.read_text()):  # noqa: ASYNC110  a process writes it
                await trio.sleep(0.1)
        try:
            with trio.fail_after(10):
                await process.finish()
        finally:
            os.kill(int(log.read_text()), signal.SIGKILL)


async def test_callbacks_that_fall_behind_are_reported_once_until_they_do_not(tmp_path: Path):
    """What is reported becomes an entry of the journal, which is told as well."""
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        process.tell(Notice(t_s=1.0, level="warning", text=text))

    process = CallbackProcess(job_of(STOPS_AT_TWO), log=tmp_path / "script.log", on_stop=lambda: None, report=report)
    for number in range(20_000):
        process.tell(committed(float(number), number + 1))
    assert len(said) == 1
    assert "callbacks are too slow: StepDone and others are not passed on" in said[0]


def test_a_fault_in_what_settings_are_made_of_is_said_with_its_line(tmp_path: Path):
    source = """
        import oobleck

        class Fails(oobleck.Job):
            @property
            def settings(self):
                raise KeyError("my own fault")

            @settings.setter
            def settings(self, value):
                pass

        def job():
            return Fails(max_steps=3)
        """
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    with pytest.raises(ConfigError, match=r"train\.py:7: KeyError: 'my own fault'"):
        describe_script(script, ())


@pytest.mark.slow
def test_a_script_that_takes_minutes_to_return_its_job_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfrom oobleck import Job\n\ndef job():\n    time.sleep(125)\n    return Job(max_steps=3)\n"
    )
    assert json.loads(describe_script(script, ()).settings)["max_steps"] == 3
    assert [entry.getMessage() for entry in caplog.records] == [
        f"script {script} has taken 20 s so far; waiting for it"
    ]


# --- processes that a script starts ------------------------------------------------------------------------------

WATCHED = """
import multiprocessing
import os
import time
from pathlib import Path
from oobleck import Job

def watch():
    time.sleep(60)

def job():
    watcher = multiprocessing.get_context("fork").Process(target=watch)
    watcher.start()
    Path({noted!r}).write_text(f"{{os.getpid()}}\\n{{watcher.pid}}\\n")
    {then}
"""
"""Its watcher holds what the script has open, and Python waits for it at the script's end."""


async def test_a_script_is_ended_with_the_processes_that_it_has_started(tmp_path: Path):
    script, noted = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(WATCHED.format(noted=str(noted), then="return Job(max_steps=3)"))
    began_s = time.monotonic()
    assert json.loads(describe_script(script, ()).settings)["max_steps"] == 3
    assert time.monotonic() - began_s < 40, "less than its watcher takes"
    await all_to_end(noted_by(noted))


async def test_a_script_that_is_gone_is_not_waited_for_while_its_processes_live(tmp_path: Path):
    script, noted = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(WATCHED.format(noted=str(noted), then="os._exit(7)"))
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match="ended by itself, with the exit code 7"):
        describe_script(script, ())
    assert time.monotonic() - began_s < 40, "less than its watcher takes"
    await all_to_end(noted_by(noted))


INTERRUPTED = """
import os
import time
from pathlib import Path
from oobleck import Job

def wait(where):
    if where == {where!r}:
        Path({noted!r}).write_text(f"{{os.getpid()}}\\n")
        time.sleep(60)

def model():
    wait("model")

def job():
    wait("job")
    return Job(model=model)
"""


@pytest.mark.parametrize("where", ["job", pytest.param("model", marks=SLOW)])
async def test_an_interrupt_from_the_terminal_ends_a_script_at_once(tmp_path: Path, where: str):
    script, noted = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(INTERRUPTED.format(noted=str(noted), where=where))
    command = module_command("oobleck", "up", f"--base-dir={tmp_path}", "--local", "1", str(script))
    # The terminal sends it to all processes of the foreground.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0) as process:  # noqa: ASYNC220  the test waits for it
        try:
            with trio.fail_after(60):
                while not noted_by(noted):  # noqa: ASYNC110  a process writes it
                    await trio.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=4)  # a script that has returned its job is given five seconds
        finally:
            process.kill()
    await all_to_end(noted_by(noted), within_s=1)


@pytest.fixture
def quick_clock() -> MockClock:
    """The thirty seconds of callbacks are three."""
    return MockClock(rate=10)


@SLOW
async def test_callbacks_that_are_killed_are_so_with_the_processes_that_they_have_started(
    tmp_path: Path, quick_clock: MockClock
):
    noted = tmp_path / "pids"
    source = WATCHED.format(noted=str(noted), then="return Job(callbacks=[object()])")
    process = CallbackProcess(job_of(source), log=tmp_path / "script.log", on_stop=lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        with trio.fail_after(1200):
            while not noted_by(noted):  # noqa: ASYNC110  a process writes it
                await trio.sleep(0.5)
        await process.finish()
    with trio.fail_after(1200):
        await all_to_end(noted_by(noted))


# --- trials before a run -----------------------------------------------------------------------------------------

LAYERS = """
import sys
import torch
from torch import nn
from oobleck import Job

WORDS = sys.argv

class Counting(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

class Average:
    def __init__(self, model):
        self.model = model

def layers():
    if "file" in WORDS:
        open("/nowhere/weights")
    if "end" in WORDS:
        import os
        os._exit(9)
    made = [nn.Embedding(300, 16), nn.Linear(16, 16), nn.Linear(16, 300)]
    if "narrow" in WORDS:
        made[1] = nn.Linear(8, 16)
    if "zeros" in WORDS:
        nn.init.zeros_(made[2].weight)
    return made

def loss(output, labels, num_items):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="mean")

def job():
    given = {}
    if "mean" in WORDS:
        given["loss"] = loss
    if "count" in WORDS:
        given["optimizer"] = lambda groups: Counting(groups, lr=0.1)
    if "average" in WORDS:
        given["callbacks"] = [Average(nn.Linear(2, 2))]
    return Job(model=layers, data=list, sequence_length=8, vocab_size=300, global_batch_size=4, **given)
"""


def opened(tmp_path: Path, word: str, *, are_virtual: bool = True) -> tuple[JobSpec, object]:
    script = tmp_path / "train.py"
    script.write_text(LAYERS)
    return open_job(
        JobSource(script=script, arguments=(word,)), num_nodes=2, finish=lambda job: job, are_virtual=are_virtual
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        pytest.param("narrow", r"layer 1 does not run", marks=SLOW),
        pytest.param("mean", r"loss", marks=SLOW),
        pytest.param("count", r"optimizer\.optim: Counting goes by self\.count", marks=SLOW),
        pytest.param("file", r"model cannot be built: FileNotFoundError", marks=SLOW),
        ("average", r"Job\(callbacks=….: Average\.model is a Linear"),
    ],
)
def test_what_a_script_makes_is_tried_before_anything_is_started(tmp_path: Path, word: str, message: str):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("file", "the script's model cannot be built: FileNotFoundError: .*; nodes try model, loss and optimizer once"),
        pytest.param(
            "end",
            r"script \S+train\.py ended, with the exit code 9, as it was tried; nodes try",
            marks=SLOW,
        ),
        pytest.param(
            "zeros",
            r"the script's model\(\) gives parameters or buffers values by itself: each worker builds",
            marks=SLOW,
        ),
        pytest.param("nothing", "^$", marks=SLOW),
    ],
)
def test_what_only_nodes_can_try_and_what_a_trial_finds_are_said(
    tmp_path: Path, word: str, said: str, capsys: pytest.CaptureFixture[str]
):
    job, _ = opened(tmp_path, word, are_virtual=False)
    assert job.script is not None
    assert job.script.provides == ("data", "model")
    assert job.script.is_tried == (word not in ("file", "end"))
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_that_is_refused_by_a_trial_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text(LAYERS)
    assert main(["up", "--local", "2", "--base-dir", str(tmp_path / "runs"), str(script), "--", "count"]) == 78
    assert "oobleck: optimizer.optim: Counting goes by self.count" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()

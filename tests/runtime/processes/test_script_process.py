"""The process of a script's callbacks: told of everything, able to stop the run, and unable to hurt it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import trio

from oobleck.control.journal import Notice
from oobleck.errors import ConfigError
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.processes.script_process import CallbackProcess, describe_script
from tests.runtime.ssh_servers import until
from tests.training.process.test_callbacks import step

STOPS_AT_TWO = """
from oobleck import Job

class Stopper:
    def on_step_end(self, args, state, control, **kwargs):
        print("heard of step", state.global_step)
        control.should_training_stop = state.global_step == 2

def job():
    return Job(callbacks=[Stopper()])
"""


def job_of(source: str) -> JobSpec:
    return JobSpec(script=ScriptSpec(name="train.py", source=source, directory="/nowhere", provides=("callbacks",)))


async def test_a_callback_hears_of_every_step_and_may_stop_the_run(tmp_path: Path):
    stopped = trio.Event()
    log = tmp_path / "script.log"
    process = CallbackProcess(job_of(STOPS_AT_TWO), log=log, on_stop=stopped.set)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        process.tell(step(1))
        process.tell(step(2))
        with trio.fail_after(120):
            await stopped.wait()
        process.tell(step(3))
        await process.finish()
    assert log.read_text().splitlines() == [f"heard of step {number}" for number in (1, 2, 3)]


async def test_a_script_that_ends_its_process_ends_nothing_else(tmp_path: Path):
    log = tmp_path / "script.log"
    source = "import os\nprint('about to go', flush=True)\nos._exit(7)"
    said: list[str] = []
    process = CallbackProcess(job_of(source), log=log, on_stop=lambda: None, report=said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        with trio.fail_after(120):
            for number in range(1, 4):
                process.tell(step(number))
            await process.finish()
        process.tell(step(4))
    assert log.read_text() == "about to go\n"
    assert set(said) <= {f"the script's callbacks have ended; see {log}"}, "a few entries fit a pipe nobody reads"


RAISES = """
from oobleck import Job

class Broken:
    def on_step_end(self, args, state, control, **kwargs):
        raise ValueError("no route to the tracker")

def job():
    return Job(callbacks=[Broken()])
"""


async def test_a_callback_that_raises_is_reported_once_and_its_traceback_is_in_the_log(tmp_path: Path):
    log, said = tmp_path / "script.log", []
    process = CallbackProcess(job_of(RAISES), log=log, on_stop=lambda: None, report=said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        for number in range(1, 4):
            process.tell(step(number))
        with trio.fail_after(120):
            await until(lambda: said, timeout_s=120)  # torch has to be imported first
            await process.finish()
    assert said == [f"the callback Broken.on_step_end failed: ValueError: no route to the tracker; see {log}"]
    assert log.read_text().count("ValueError: no route to the tracker") == 3


async def test_callbacks_that_fall_behind_are_reported_once_until_they_do_not(tmp_path: Path):
    """What is reported becomes an entry of the journal, which is told as well."""
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        process.tell(Notice(t_s=1.0, level="warning", text=text))

    process = CallbackProcess(job_of(RAISES), log=tmp_path / "script.log", on_stop=lambda: None, report=report)
    for number in range(20_000):
        process.tell(step(number + 1))
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

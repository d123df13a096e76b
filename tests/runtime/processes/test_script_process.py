"""The process of a script's callbacks: told of everything, able to stop the run, and unable to hurt it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import trio

from oobleck.errors import ConfigError
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.processes.script_process import CallbackProcess, describe_script
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
    process = CallbackProcess(job_of(source), log=log, on_stop=lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        with trio.fail_after(120):
            for number in range(1, 4):
                process.tell(step(number))
            await process.finish()
        process.tell(step(4))
    assert log.read_text() == "about to go\n"


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

"""The process that trains by itself, for a comparison that never begins."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from oobleck.cli.inputs import JobSource
from oobleck.cli.verify.both_ways import Asked, train_both_ways
from oobleck.errors import ExitCode
from oobleck.job import JobSpec, ScriptSpec
from tests.processes import lives, noted_by

FORKS = """
import multiprocessing
import time
from pathlib import Path

def watch():
    time.sleep(60)

def job():
    watcher = multiprocessing.get_context("fork").Process(target=watch)
    watcher.start()
    Path({noted!r}).write_text(f"{{watcher.pid}}\\n")
    raise ValueError("no route to the data")
"""


@pytest.mark.slow  # imports torch
def test_a_script_that_fails_is_not_waited_for_while_its_processes_live(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    script = ScriptSpec(name="train.py", source=FORKS.format(noted=str(noted)), directory=str(tmp_path))
    asked = Asked(
        job=JobSpec(script=script, max_steps=1), source=JobSource(), num_steps=1, num_nodes=1, began_s=time.time()
    )
    try:
        outcome = train_both_ways(asked, tell=[].append)
        (watcher,) = noted_by(noted)
        assert lives(watcher), "it was waited for"
    finally:
        for pid in noted_by(noted):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert outcome.exit_code != ExitCode.DONE
    assert "no route to the data" in outcome.problem

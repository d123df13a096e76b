"""Whose processor time counts for a process: its own, and that of all that it has started."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from oobleck.runtime.agent.workers import processor_s

BUSY = "until = time.process_time() + 0.5\nwhile time.process_time() < until: pass\n"
REST = "print('done', flush=True)\ntime.sleep(60)\n"


def used_s(source: str) -> float:
    """What a process has used by the time at which it rests."""
    with subprocess.Popen([sys.executable, "-c", f"import subprocess, sys, time\n{source}"], stdout=-1) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            first_s = processor_s(process.pid)
            time.sleep(0.3)
            assert processor_s(process.pid) - first_s < 0.03, "it rests"
            return first_s
        finally:
            process.kill()


def test_what_a_process_computes_counts():
    assert used_s(BUSY + REST) >= 0.45


@pytest.mark.slow
def test_what_a_child_computes_counts_while_it_lives_and_after():
    child = "import time\n" + BUSY
    living = f"subprocess.Popen([sys.executable, '-c', {child + REST!r}])\ntime.sleep(60)\n"
    ended = f"subprocess.run([sys.executable, '-c', {child!r}])\n" + REST
    assert used_s(living) >= 0.45
    assert used_s(ended) >= 0.45


def test_a_process_that_is_gone_uses_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert processor_s(process.pid) == 0.0

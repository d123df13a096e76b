"""The kernel's kills are told from others', and each explains one end."""

from __future__ import annotations

import os
import subprocess
import sys

import trio

from oobleck.control.journal import Failure, failure_of_end
from oobleck.control.protocol import Exited, Killed, end_text
from oobleck.runtime.agent.fork_client import ForkedProcess, OomKills

BY_KERNEL = Killed(signal=9, is_out_of_memory=True)


def ended(end: Killed | Exited) -> ForkedProcess:
    process = ForkedProcess(os.getpid(), trio.lowlevel.FdStream(os.open(os.devnull, os.O_RDONLY)), is_warm=False)
    process.end = end
    return process


def test_a_kill_that_the_kernel_has_counted_is_its_own_and_others_are_not():
    counts = iter([3, 3, 4, 4])
    kills = OomKills(lambda: next(counts))
    assert kills.explain(ended(Killed(signal=9))) == Killed(signal=9)
    victim = ended(Killed(signal=9))
    assert kills.explain(victim) == kills.explain(victim) == BY_KERNEL, "the same however often it is asked"
    assert kills.explain(ended(Killed(signal=9))) == Killed(signal=9)


def test_two_that_the_kernel_kills_together_are_both_explained():
    counts = iter([0, 2, 2, 2])
    kills = OomKills(lambda: next(counts))
    assert [kills.explain(ended(Killed(signal=9))) for _ in range(3)] == [BY_KERNEL, BY_KERNEL, Killed(signal=9)]


def test_other_ends_are_what_they_are():
    counts = iter([0])
    kills = OomKills(lambda: next(counts))
    for end in (Exited(exit_code=1), Killed(signal=11), Killed(signal=15)):
        assert kills.explain(ended(end)) == end


def test_a_worker_that_ran_out_of_memory_is_told_so_and_what_helps():
    assert failure_of_end(BY_KERNEL) is Failure.OUT_OF_MEMORY
    assert failure_of_end(Killed(signal=9)) is Failure.KILLED
    assert end_text(BY_KERNEL) == "killed by signal 9, the kernel's: its cgroup is out of memory"


def test_an_agent_counts_where_it_runs():
    """Wherever these tests run: the kernel's files are there, or count nothing."""
    code = "from oobleck.runtime.agent.fork_client import OomKills; OomKills()"
    subprocess.run([sys.executable, "-c", code], check=True)

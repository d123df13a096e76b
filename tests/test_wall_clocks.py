"""No decision compares the wall clocks of two machines: whoever reads one is listed, with what becomes of it."""

from __future__ import annotations

import ast
from pathlib import Path

import oobleck

PACKAGE = Path(oobleck.__file__).parent
READS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
READERS = {
    "cli/masterless.py": "shown to people",
    "cli/runs.py": "the age of files of this machine",
    "cli/up/options.py": "a deadline that the user names, as time that is left",
    "cli/up/run_job.py": "the run's name, which is compared for being equal",
    "cli/wiring/past.py": "how long a run had no master, which never goes back",
    "cli/verify/command.py": "files of this machine that this process has written",
    "cli/run/run_ranks.py": "the run's name, which is compared for being equal",
    "runtime/agent/checkpoint_store.py": "the age of memory of this machine",
    "runtime/metrics_output.py": "shown to people",
    "runtime/node_check/probe.py": "how far a node's clock is off, shown to people",
    "training/checkpoint/imported.py": "shown to people, and the order of runs that begin from nothing",
    "training/checkpoint/state.py": "shown to people, and the order of runs that begin from nothing",
    "training/flash/interface.py": "shown to people, and a name that is compared for being equal",
    "training/process/node_probe.py": "how far a node's clock is off, shown to people",
    "training/process/rank.py": "torchrun's file of an error, shown to people",
    "transformers/follower.py": "how long this process has trained, shown to people",
}
"""All that read the wall clock, outside the simulator, which has none."""


def reads_wall_clock(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    named = (function for function in calls if isinstance(function, ast.Attribute))
    return any((ast.unparse(function.value).split(".")[-1], function.attr) in READS for function in named)


def test_whoever_reads_the_wall_clock_is_listed_with_what_becomes_of_it() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if reads_wall_clock(path)}
    assert found == READERS.keys()

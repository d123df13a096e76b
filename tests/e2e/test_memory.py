"""A worker that the kernel ends because its cgroup is out of memory: the next plan gives each node less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from oobleck.control.journal import PlanAdopted
from oobleck.planner import profile_from_json
from oobleck.runtime.journals import read_journal

from .harness import TAG, Runner, oobleck, worker_pids

LIMIT = 6 << 30
SCRIPT = Path(__file__).with_name("failing_job.py")
ENTER = 'echo $$ > "$0"/cgroup.procs; exec "$@"'


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup for a whole run."""
    path = Path(f"/sys/fs/cgroup/memory/oobleck-e2e-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        with suppress(OSError):
            path.rmdir()
        pytest.skip(f"no memory cgroup of version 1 may be made here: {error.strerror}")
    yield path
    with suppress(OSError):  # what ends after its run is in it for a moment yet
        path.rmdir()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Runner]:
    """A runner whose fork server is in the group as well."""
    runner = Runner(tmp_path)
    yield runner
    runner.close()


@pytest.mark.slow
def test_a_worker_that_the_kernel_ends_for_lack_of_memory_leaves_plans_that_need_less(own: Runner, group: Path) -> None:
    orders = own.directory / "orders"
    orders.mkdir()
    where = ("--local", "4", str(SCRIPT), "--tag", TAG, "--steps", "100000", "--set", "checkpoint.enabled=false")
    with own.up("--", str(orders), nodes=where, within=("/bin/sh", "-c", ENTER, str(group))) as up:
        up.wait_for_steps(3)
        (orders / str(worker_pids(own)["node2"])).write_text("cgroup")
        said = up.wait_for("node2 ran out of memory: plans use at most")
        assert "from now on" in said
        up.wait_for_steps(5)
        assert oobleck("stop", "--base-dir", str(own.base_dir)).returncode == 0
        assert up.finish().exit_code == 0
    entries = own.journal()
    (down,) = [entry for entry in entries if entry["@type"] == "WorkerDown"]
    assert down["node"] == "node2"
    assert down["end"]["is_out_of_memory"] is True
    known = [entry for entry in entries if entry["@type"] == "ProfileKnown"]
    before, after = (profile_from_json(entry["profile_json"], source="").device.memory_bytes for entry in known)
    assert before == LIMIT // 4, "the cgroup's limit, for four nodes"
    assert after < before
    plans = [
        entry.plan for entry in read_journal(own.base_dir / TAG / "journal.jsonl") if isinstance(entry, PlanAdopted)
    ]
    smallest = [min(len(pipeline.nodes) for pipeline in plan.pipelines) for plan in plans]
    assert smallest[0] == 1
    assert smallest[-1] > 1, "no node holds the whole model any more"

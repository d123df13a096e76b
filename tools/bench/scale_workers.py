"""Real workers of `scale.py`: N virtual nodes of this machine, one of which is killed.

The master is `oobleck up` with all that it does there: the SSH server of its virtual nodes is in its process, so its
processor seconds are both ends' of every connection. Bytes are those that it sends to its nodes through SSH, as the
kernel counts them (`ss`); without `ss` they are not known.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oobleck.planner import profile_from_json, profile_to_json
from oobleck.runtime.files import RunDirectory
from tools.bench.recovery import TAG, Run, kill_node, pids_of

__all__ = ["Kill", "measure_kill"]

_JOB = """\
tag: {tag}
model: {{type: gpt2, n_embd: 32, n_layer: 6, n_head: 2}}
data: {{sequence_length: 16, vocab_size: 257, max_bytes: 100000}}
global_batch_size: {batch}
microbatch_size: 1
num_pipelines: {pipelines}
max_steps: 1000000
torch_threads: 1
checkpoint: {{enabled: false}}
control: {{lease_s: 60, start_timeout_s: 300, connect_timeout_s: 60}}
"""
"""As small as it can be: what is measured is not the arithmetic. Leases are long, for the machine may be busy."""
_NODES = 4
"""Of a pipeline: two layers each."""
_MICROBATCHES = 4
"""Of a pipeline, in a step."""
_FORWARD_S, _BACKWARD_S = 0.01, 0.02
"""Of any layer, as the planner is told: by what is measured on a busy machine it would leave other nodes as spares in
each run, and a spare that is lost costs nothing."""
_WARM_UP_STEPS = 5
_STEPS = 5
"""That are looked at before and after."""
_BYTES_SENT = re.compile(r"\bbytes_sent:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One killed node: medians of a few runs; times in seconds."""

    nodes: int
    """Of one device each, before the loss."""
    runs: int
    spares: float
    """Of the nodes, before the loss; the one that is lost is none of them."""
    start_s: float
    """From the command to the first steps."""
    step_s: float
    decide_s: float
    stall_s: float
    """Time in which no microbatch of a committed step made progress anywhere, as the summary has it."""
    done_s: float
    """From the kill until all compute under the new plan, and the master knows."""
    master_s: float
    """Processor seconds of the master meanwhile."""
    sent_bytes: float | None
    """What the master sent meanwhile."""
    sockets_before: float
    """Of the surviving worker that has most."""
    sockets_after: float
    worker_s: float
    """Processor seconds of a surviving worker meanwhile, its steps included; of the one that spent most."""
    busy: float
    """Which part of all cores' time master, agents and workers took meanwhile: near 1, all wait for cores."""


def measure_kill(num_nodes: int, num_runs: int) -> Kill:
    """Have so many runs of so many nodes lose one."""
    num_pipelines = max(2, num_nodes // _NODES)
    job_text = _JOB.format(tag=TAG, batch=_MICROBATCHES * num_pipelines, pipelines=num_pipelines)
    with tempfile.TemporaryDirectory(prefix="obsc") as directory:
        _keep_profile(Path(directory), num_nodes, job_text)
        kills = [_kill_once(Path(directory), number, num_nodes, job_text) for number in range(num_runs)]
    medians: dict[str, Any] = {
        part.name: statistics.median(values)
        if None not in (values := [getattr(kill, part.name) for kill in kills])
        else None
        for part in fields(Kill)
    }
    return Kill(**{**medians, "nodes": num_nodes, "runs": num_runs})


def _keep_profile(directory: Path, num_nodes: int, job_text: str) -> None:
    """Measure the job for so many nodes and make all its layers alike, where `Run` will look for the profile."""
    job, base_dir = directory / "job.yaml", directory / "base"
    job.write_text(job_text, encoding="utf-8")
    command = [sys.executable, "-m", "oobleck", "profile", str(job), "--workers", str(num_nodes)]
    subprocess.run([*command, "--base-dir", str(base_dir)], check=True, stdout=subprocess.DEVNULL)
    (path,) = RunDirectory(base_dir=base_dir, tag=TAG).profile.iterdir()
    profile = profile_from_json(path.read_text(encoding="utf-8"))
    alike = [replace(layer, forward_s={1: _FORWARD_S}, backward_s={1: _BACKWARD_S}) for layer in profile.layers]
    path.write_text(profile_to_json(replace(profile, layers=tuple(alike))), encoding="utf-8")


def _kill_once(directory: Path, number: int, num_nodes: int, job_text: str) -> Kill:
    began_s = time.monotonic()
    run = Run(directory, number, nodes=num_nodes, job_text=job_text)
    try:
        run.wait_for_step(_WARM_UP_STEPS)
        start_s = time.monotonic() - began_s
        for _ in range(_STEPS):
            run.wait_for_next_step()
        steps_s = run.steps()[_WARM_UP_STEPS:]
        plan_nodes = run.plan_nodes
        if run.victim not in plan_nodes:
            raise RuntimeError(f"{run.victim} is to be killed, but is a spare: {num_nodes} nodes, {job_text}")
        survivors = [pid for node, pid in run.workers.items() if node != run.victim]
        sockets_before = max(map(_num_sockets, survivors))
        workers_before = {pid: _processor_s(pid) for pid in survivors}
        processes = [run.pid, *(pid for node in run.workers if node != run.victim for pid in pids_of(run, node))]
        master_s, sent_bytes = _processor_s(run.pid), _sent_bytes(run.pid)
        all_s = sum(map(_processor_s, processes))
        killed_s = kill_node(run)
        done = run.wait_for(lambda entry: entry["@type"] == "RecoveryDone")
        done_s = time.monotonic() - killed_s
        all_s = sum(map(_processor_s, processes)) - all_s
        master_s = _processor_s(run.pid) - master_s
        sent_after = _sent_bytes(run.pid)
        worker_s = max(_processor_s(pid) - before_s for pid, before_s in workers_before.items())
        for _ in range(_STEPS):
            run.wait_for_next_step()
        return Kill(
            nodes=num_nodes,
            runs=1,
            spares=num_nodes - len(plan_nodes),
            start_s=start_s,
            step_s=statistics.median(steps_s),
            decide_s=float(str(done["decide_s"])),
            stall_s=float(str(done["stall_s"])),
            done_s=done_s,
            master_s=master_s,
            sent_bytes=None if sent_bytes is None or sent_after is None else _grown(sent_bytes, sent_after),
            sockets_before=sockets_before,
            sockets_after=max(map(_num_sockets, survivors)),
            worker_s=worker_s,
            busy=all_s / done_s / (os.cpu_count() or 1),
        )
    finally:
        run.kill()


def _processor_s(pid: int) -> float:
    """User and system time of a process, by its own clock: `MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)` of Linux."""
    return time.clock_gettime(~pid << 3 | 2)


def _num_sockets(pid: int) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += os.readlink(link).startswith("socket:")
    return count


def _sent_bytes(pid: int) -> dict[str, int] | None:
    """What a process has sent on each connection that it made to a port of its own; None without `ss`."""
    if shutil.which("ss") is None:
        return None
    own = f"pid={pid},"
    ports = {line.split()[3].rpartition(":")[2] for line in _ss("-tlnpH") if own in line}
    sent: dict[str, int] = {}
    lines = iter(_ss("-tnpHi", "state", "established"))
    for line, details in zip(lines, lines, strict=True):  # a line of the connection, and one of what the kernel knows
        local, peer = line.split()[2:4]
        counted = _BYTES_SENT.search(details)
        if own in line and peer.rpartition(":")[2] in ports:
            sent[local] = int(counted[1]) if counted else 0
    return sent


def _ss(*options: str) -> list[str]:
    return subprocess.run(["ss", *options], capture_output=True, text=True, check=True).stdout.splitlines()


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """What was sent in between on connections that are still there."""
    return sum(number - before.get(connection, 0) for connection, number in after.items())

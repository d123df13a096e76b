"""How long failures keep a job waiting: four local nodes, one fault after the other, beside torchrun's restart.

    python tools/bench/recovery.py --runs 5

Every run trains the same small transformer (4 layers, hidden 128) at default settings. Times count from the moment
of the signal, by this process's clock: `next step` to the first step committed after it, as it appears in the
journal; `stall` is the summary's `stall_s`. The baseline is torchrun's elastic restart of the same model with a
checkpoint each step, on the same machine in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oobleck.runtime.agent_dir import AgentDir
from oobleck.runtime.run_dir import RunDirectory

_TAG = "bench-recovery"
_FAULT_STEP = 20
_AFTER_STEPS = 15
_TIMEOUT_S = 120.0
_JOB = f"""\
tag: {_TAG}
model: {{type: gpt2, n_embd: 128, n_layer: 4, n_head: 4}}
data: {{sequence_length: 64, vocab_size: 512, max_bytes: 400000}}
global_batch_size: 16
microbatch_size: 2
num_pipelines: 2
max_steps: 100000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault in one run; times in seconds."""

    stall_s: float
    next_step_s: float
    step_s: float
    """An ordinary step's median in the same run."""
    steps_lost: int
    survivors: int


class Run:
    """A local run of `oobleck up` under way, and its journal as it grows."""

    def __init__(self, directory: Path, number: int) -> None:
        self.base_dir = directory / "base"
        self._summary = directory / f"summary{number}.json"
        job = directory / "job.yaml"
        job.write_text(_JOB, encoding="utf-8")
        self._journal = self.base_dir / _TAG / "journal.jsonl"
        self._journal.unlink(missing_ok=True)
        self._position = 0
        command = [sys.executable, "-m", "oobleck", "up", "--local", "4", "--job", str(job), "--plain"]
        self._process = subprocess.Popen(
            [*command, "--base-dir", str(self.base_dir), "--summary", str(self._summary)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )

    def wait_for(self, wanted: Callable[[dict[str, object]], bool]) -> dict[str, object]:
        """Read the journal until an entry is wanted; returns it as soon as it is written."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            for entry in self._new_entries():
                if wanted(entry):
                    return entry
            time.sleep(0.001)
        raise RuntimeError(f"the run ended, or said nothing of it within {_TIMEOUT_S:g} s; see {self._journal}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda entry: entry["@type"] == "StepDone" and _step(entry) >= step)

    def wait_for_next_step(self) -> None:
        self.wait_for(lambda entry: entry["@type"] == "StepDone")

    def skip(self) -> None:
        """Read what is there already."""
        list(self._new_entries())

    def command(self, *arguments: str) -> None:
        """Run another oobleck command on this run."""
        subprocess.run(
            [sys.executable, "-m", "oobleck", *arguments, "--tag", _TAG, "--base-dir", str(self.base_dir)],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def stop(self) -> dict[str, object]:
        """End the run after the step in flight; returns its summary."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_TIMEOUT_S)
        summary: dict[str, object] = json.loads(self._summary.read_text(encoding="utf-8"))
        return summary

    def kill(self) -> None:
        """End it whatever happens."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_TIMEOUT_S)

    def _new_entries(self) -> list[dict[str, object]]:
        if not self._journal.exists():
            return []
        with self._journal.open("rb") as file:
            file.seek(self._position)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._position += sum(map(len, whole))
        return [json.loads(line) for line in whole]


def _step(entry: dict[str, object]) -> int:
    record = entry["record"]
    assert isinstance(record, dict)
    return int(record["step"])


def _pids(run: Run, node: str, pattern: str = "*.pid") -> list[int]:
    run_id = RunDirectory(base_dir=run.base_dir, tag=_TAG).run_id
    return [int(path.read_text()) for path in AgentDir(run_id, node).path.glob(pattern)]


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _kill_node(run: Run) -> float:
    pids = _pids(run, "node2")
    at_s = time.monotonic()
    _signal(pids, signal.SIGKILL)
    return at_s


def _freeze_node(run: Run) -> float:
    pids = _pids(run, "node2")
    at_s = time.monotonic()
    _signal(pids, signal.SIGSTOP)
    return at_s


def _kill_worker(run: Run) -> float:
    pids = _pids(run, "node2", "worker*.pid")
    at_s = time.monotonic()
    _signal(pids, signal.SIGKILL)
    return at_s


def _join(run: Run) -> float:
    """A node joins: timed from the moment that it is ready."""
    run.command("add", "node4")
    run.wait_for(lambda entry: entry["@type"] == "WorkerUp" and entry["node"] == "node4")
    return time.monotonic()


def _drain(run: Run) -> float:
    run.command("drain", "node2")
    return time.monotonic()


_FAULTS: dict[str, tuple[Callable[[Run], float], int]] = {
    "killed node": (_kill_node, 3),
    "frozen node": (_freeze_node, 3),
    "killed worker": (_kill_worker, 4),
    "join": (_join, 5),
    "drain": (_drain, 3),
}
"""What is done, and how many nodes train at the end."""


def measure(fault: str, directory: Path, number: int) -> Outcome:
    """Do one fault to one run."""
    act, _ = _FAULTS[fault]
    run = Run(directory, number)
    try:
        run.wait_for_step(_FAULT_STEP)
        run.skip()
        at_s = act(run)
        if fault == "frozen node":  # the step that was being committed may still be told
            run.wait_for(lambda entry: entry["@type"] == "NodeLost")
        run.wait_for_next_step()
        first_s = time.monotonic() - at_s
        if fault == "killed worker":
            run.wait_for(lambda entry: entry["@type"] == "RecoveryDone" and entry["action"] == "restart_worker")
        for _ in range(_AFTER_STEPS):
            run.wait_for_next_step()
        summary = run.stop()
    finally:
        run.kill()
    recoveries = summary["recoveries"]
    step_time = summary["step_time_s"]
    plan = summary["plan"]
    assert isinstance(recoveries, list)
    assert isinstance(step_time, dict)
    assert isinstance(plan, dict)
    return Outcome(
        stall_s=max(recovery["stall_s"] for recovery in recoveries),
        next_step_s=first_s,
        step_s=step_time["median"],
        steps_lost=int(str(summary["steps_lost"])),
        survivors=len({stage["node"] for pipeline in plan["pipelines"] for stage in pipeline["stages"]}),
    )


def measure_torchrun(directory: Path) -> float:
    """Seconds from a worker's SIGKILL to the first step after torchrun's restart, a checkpoint each step."""
    script = Path(__file__).parent / "torchrun_job.py"
    log = directory / "torchrun.jsonl"
    log.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=3"]
    process = subprocess.Popen(
        [*launcher, str(script), str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        before = _wait_for_line(log, lambda entry: entry["step"] >= _FAULT_STEP)
        at_s = time.monotonic()
        os.kill(int(before["pids"][2]), signal.SIGKILL)
        _wait_for_line(log, lambda entry: entry["restart"] > before["restart"])
        return time.monotonic() - at_s
    finally:
        process.terminate()
        process.wait(60)


def _wait_for_line(path: Path, wanted: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and wanted(entry := json.loads(line)):
                    return entry
        time.sleep(0.002)
    raise RuntimeError(f"torchrun's job did not get there within {_TIMEOUT_S:g} s")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faults", nargs="*", choices=[*_FAULTS, []], default=list(_FAULTS))
    parser.add_argument("--no-torchrun", action="store_true")
    arguments = parser.parse_args()
    print(
        f"{'fault':<16}{'runs':>5}{'stall s, median (max)':>26}{'next step s':>14}{'step s':>9}{'lost':>6}{'nodes':>8}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        killed_s = 0.0
        for fault in arguments.faults:
            outcomes = [measure(fault, directory, number) for number in range(arguments.runs)]
            stalls = [outcome.stall_s for outcome in outcomes]
            next_s = statistics.median(outcome.next_step_s for outcome in outcomes)
            killed_s = killed_s or next_s
            nodes = f"{min(outcome.survivors for outcome in outcomes)}/{_FAULTS[fault][1]}"
            print(
                f"{fault:<16}{len(outcomes):>5}{statistics.median(stalls):>17.3f} ({max(stalls):.3f})"
                f"{next_s:>14.3f}{statistics.median(outcome.step_s for outcome in outcomes):>9.3f}"
                f"{sum(outcome.steps_lost for outcome in outcomes):>6}{nodes:>8}",
                flush=True,
            )
        if not arguments.no_torchrun:
            times = [measure_torchrun(directory) for _ in range(arguments.runs)]
            median_s = statistics.median(times)
            print(f"torchrun, killed worker, to the next step: {median_s:.2f} s, {median_s / killed_s:.0f} times ours")


if __name__ == "__main__":
    main()

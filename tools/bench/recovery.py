"""How long failures keep a job waiting: local nodes, one fault after the other, beside torchrun's restart.

    python tools/bench/recovery.py --runs 5

Every run trains the same small transformer (4 layers, hidden 128) at default settings. Times count from the moment
of the signal, by this process's clock: `next step` to the first step committed after it, as it appears in the
journal; `stall` is the summary's `stall_s`. A killed master leads to no recovery: there `stall` is by how much the
longest step that was committed meanwhile was longer than the longest of those before, and `next step` is how long a
new master takes from the start of its process until it reports a step. The baseline is torchrun's elastic restart of
the same model with a checkpoint each step, on the same machine in the same run. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.runtime.files import AgentDir, RunDirectory
from tools.smoke import parse_arguments

__all__ = ["TAG", "Run", "end_runs_when_terminated", "kill_node", "pids_of"]

TAG = "bench-recovery"
_FAULT_STEP = 20
_AFTER_STEPS = 15
_WARM_UP_STEPS = 3
_AWAY_S = 2.0
_TIMEOUT_S = 120.0
_LINES_SHOWN = 10
"""Of what a run said that ended too soon."""
_JOB = f"""\
tag: {TAG}
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
    nodes: int
    """That train after it."""
    kept: int
    """Workers that were there before, and still are."""


class Run:
    """A local run of `oobleck up` under way, and its journal as it grows."""

    def __init__(self, directory: Path, number: int, *, nodes: int = 4, job_text: str = _JOB) -> None:
        self.base_dir = directory / "base"
        self.victim, self.newcomer = f"node{nodes // 2}", f"node{nodes}"
        self._summary = directory / f"summary{number}.json"
        self._output = directory / f"output{number}.txt"
        job = directory / "job.yaml"
        job.write_text(job_text, encoding="utf-8")
        self._journal = self.base_dir / TAG / "journal.jsonl"
        self._journal.unlink(missing_ok=True)
        self._position = 0
        self.entries: list[dict[str, object]] = []
        """What was read of the journal."""
        command = [sys.executable, "-m", "oobleck", "up", "--local", str(nodes), "--job", str(job), "--plain"]
        self._command = [*command, "--base-dir", str(self.base_dir), "--summary", str(self._summary)]
        self._process = self._start(resume="never")

    def _start(self, *, resume: str) -> subprocess.Popen[bytes]:
        command = [*self._command, "--resume", resume]
        with self._output.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def crash_master(self, *, down_s: float) -> float:
        """Kill the master, and start another one later; returns when that was."""
        self._process.kill()
        self._process.wait(_TIMEOUT_S)
        time.sleep(down_s)
        started_s = time.monotonic()
        self._process = self._start(resume="auto")
        return started_s

    @property
    def pid(self) -> int:
        """The master's."""
        return self._process.pid

    @property
    def plan_nodes(self) -> set[str]:
        """The nodes of the newest plan that was read."""
        plan = [entry["plan"] for entry in self.entries if entry["@type"] == "PlanAdopted"][-1]
        assert isinstance(plan, dict)
        return {node for pipeline in plan["pipelines"] for node in pipeline["nodes"]}

    @property
    def workers(self) -> dict[str, int]:
        """The worker process of each node, as far as was read."""
        return {str(entry["node"]): int(str(entry["pid"])) for entry in self.entries if entry["@type"] == "WorkerUp"}

    def steps(self) -> list[float]:
        """How long each step took that was read, in seconds, by the workers' clock."""
        records = [entry["record"] for entry in self.entries if entry["@type"] == "StepDone"]
        return [float(record["duration_s"]) for record in records if isinstance(record, dict)]

    def wait_for(self, wanted: Callable[[dict[str, object]], bool]) -> dict[str, object]:
        """Read the journal until an entry is wanted; returns it as soon as it is written."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            for entry in self._new_entries():
                if wanted(entry):
                    return entry
            time.sleep(0.001)
        exit_code = self._process.poll()
        how = f"did not come to it within {_TIMEOUT_S:g} s" if exit_code is None else f"ended with code {exit_code}"
        said = self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]
        raise RuntimeError("\n".join([f"the run {how}; at last it said:", *said]))

    def wait_for_any(self, wanted: Callable[[dict[str, object]], bool]) -> None:
        """Like `wait_for`; what was read already counts as well."""
        if not any(map(wanted, self.entries)):
            self.wait_for(wanted)

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
            [sys.executable, "-m", "oobleck", *arguments, "--tag", TAG, "--base-dir", str(self.base_dir)],
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
        """End it whatever happens, and let go of the states that lost nodes keep in memory for a next run."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_TIMEOUT_S)
        run_id = RunDirectory(base_dir=self.base_dir, tag=TAG).run_id
        shutil.rmtree(AgentDir(run_id, "any").memory.parent, ignore_errors=True)

    def _new_entries(self) -> list[dict[str, object]]:
        if not self._journal.exists():
            return []
        with self._journal.open("rb") as file:
            file.seek(self._position)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._position += sum(map(len, whole))
        read = [json.loads(line) for line in whole]
        self.entries += read
        return read


def _step(entry: dict[str, object]) -> int:
    record = entry["record"]
    assert isinstance(record, dict)
    return int(record["step"])


def pids_of(run: Run, node: str, pattern: str = "*.pid") -> list[int]:
    """The processes of a node."""
    run_id = RunDirectory(base_dir=run.base_dir, tag=TAG).run_id
    return [int(path.read_text().split()[0]) for path in AgentDir(run_id, node).path.glob(pattern)]


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # some end with others
            os.kill(pid, number)


def kill_node(run: Run) -> float:
    """Kill all that is of a node, at once; returns when that was."""
    pids = pids_of(run, run.victim)
    at_s = time.monotonic()
    _signal(pids, signal.SIGKILL)
    return at_s


def _freeze_node(run: Run) -> float:
    pids = pids_of(run, run.victim)
    at_s = time.monotonic()
    _signal(pids, signal.SIGSTOP)
    return at_s


def _kill_worker(run: Run) -> float:
    pids = pids_of(run, run.victim, "worker*.pid")
    at_s = time.monotonic()
    _signal(pids, signal.SIGKILL)
    return at_s


def _join(run: Run) -> float:
    """A node joins: timed from the moment that it is ready."""
    run.command("add", run.newcomer)
    run.wait_for(lambda entry: entry["@type"] == "WorkerUp" and entry["node"] == run.newcomer)
    return time.monotonic()


def _drain(run: Run) -> float:
    run.command("drain", run.victim)
    return time.monotonic()


def _kill_master(run: Run) -> float:
    """The master is away for some steps; timed from the start of the next one."""
    return run.crash_master(down_s=_AWAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something to do to a run, and what to hold it to."""

    act: Callable[[Run], float]
    target: str
    meets: Callable[[float, float, float], bool]
    """Of the medians: stall, next step, step."""


_FAULTS: dict[str, Fault] = {
    "killed node": Fault(
        act=kill_node,
        target="stall < 0.1, next step < 2 steps + 0.2",
        meets=lambda stall_s, next_s, step_s: stall_s < 0.1 and next_s < 2 * step_s + 0.2,
    ),
    "frozen node": Fault(
        act=_freeze_node, target="stall < lease (3) + 0.3", meets=lambda stall_s, _next_s, _step_s: stall_s < 3.3
    ),
    "killed worker": Fault(act=_kill_worker, target="stall < 0.5", meets=lambda stall_s, _n, _s: stall_s < 0.5),
    "killed master": Fault(
        act=_kill_master,
        target="no stall, back in 2",
        meets=lambda stall_s, next_s, step_s: stall_s < step_s and next_s < 2,
    ),
    "join": Fault(act=_join, target="stall < 1 step", meets=lambda stall_s, _n, step_s: stall_s < step_s),
    "drain": Fault(act=_drain, target="stall < 1 step", meets=lambda stall_s, _n, step_s: stall_s < step_s),
}


def measure(fault: str, directory: Path, number: int, *, nodes: int, at_step: int, after: int) -> Outcome:
    """Do one fault to one run, once it has made so many steps."""
    run = Run(directory, number, nodes=nodes)
    try:
        run.wait_for_step(at_step)
        run.skip()
        workers, ordinary_s = run.workers, run.steps()[_WARM_UP_STEPS:]
        at_s = _FAULTS[fault].act(run)
        first_s = _wait_until_it_goes_on(run, fault) - at_s
        left = len(run.plan_nodes)
        stalled_s = max(run.steps()[_WARM_UP_STEPS + len(ordinary_s) :]) - max(ordinary_s)
        for _ in range(after):
            run.wait_for_next_step()
        kept = sum(run.workers.get(node) == pid and _lives(pid) for node, pid in workers.items())
        summary = run.stop()
    finally:
        run.kill()
    recoveries = summary["recoveries"]
    assert isinstance(recoveries, list)
    return Outcome(
        stall_s=max([recovery["stall_s"] for recovery in recoveries], default=max(0.0, stalled_s)),
        next_step_s=first_s,
        step_s=statistics.median(ordinary_s),
        steps_lost=int(str(summary["steps_lost"])),
        nodes=left,
        kept=kept,
    )


def _wait_until_it_goes_on(run: Run, fault: str) -> float:
    """Wait for the first step after the fault, and for the plan that it leads to; returns when the step was told."""
    if fault == "frozen node":  # the step that was being committed may still be told
        run.wait_for(lambda entry: entry["@type"] == "NodeLost")
    if fault == "killed master":
        run.wait_for(lambda entry: entry["@type"] == "MasterResumed")
    run.wait_for_next_step()
    told_s = time.monotonic()
    if fault == "killed worker":
        run.wait_for(lambda entry: entry["@type"] == "RecoveryDone" and entry["action"] == "restart_worker")
    elif fault != "killed master":
        run.wait_for_any(lambda entry: entry["@type"] == "RecoveryDone")
    return told_s


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def measure_torchrun(directory: Path, *, at_step: int) -> float:
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
        before = _wait_for_line(log, lambda line: line.step >= at_step)
        at_s = time.monotonic()
        os.kill(before.pids[2], signal.SIGKILL)
        _wait_for_line(log, lambda line: line.restart > before.restart)
        return time.monotonic() - at_s
    finally:
        process.terminate()
        process.wait(60)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What rank 0 of torchrun's job reports of a step."""

    step: int
    restart: int
    pids: Sequence[int]


def _wait_for_line(path: Path, wanted: Callable[[_Line], bool]) -> _Line:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and wanted(told := _Line(**json.loads(line))):
                    return told
        time.sleep(0.002)
    raise RuntimeError(f"torchrun's job did not get there within {_TIMEOUT_S:g} s")


def end_runs_when_terminated() -> None:
    """Have SIGTERM end this process as Ctrl-C does, and so the run that it has started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def main() -> None:
    """Measure and print the table."""
    end_runs_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--faults", nargs="*", choices=[*_FAULTS, []], default=list(_FAULTS))
    parser.add_argument("--at-step", type=int, default=_FAULT_STEP, help="the step after which faults happen")
    parser.add_argument("--after", type=int, default=_AFTER_STEPS, help="steps that follow")
    parser.add_argument("--torchrun", action=argparse.BooleanOptionalAction, default=True, help="its restart as well")
    arguments = parse_arguments(
        parser, runs=1, nodes=2, faults=["killed worker"], at_step=_WARM_UP_STEPS + 1, after=2, torchrun=False
    )
    print("| fault | runs | stall (max), s | next step, s | step, s | target | met | lost | nodes | kept |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        medians: dict[str, float] = {}
        for fault in arguments.faults:
            outcomes = [
                measure(
                    fault, directory, number, nodes=arguments.nodes, at_step=arguments.at_step, after=arguments.after
                )
                for number in range(arguments.runs)
            ]
            medians[fault] = statistics.median(outcome.next_step_s for outcome in outcomes)
            print(_row(fault, outcomes), flush=True)
        if arguments.torchrun:
            times = [measure_torchrun(directory, at_step=arguments.at_step) for _ in range(arguments.runs)]
            median_s = statistics.median(times)
            print(f"| torchrun, killed worker | {len(times)} | | {median_s:.2f} | | | | | | |")
            for fault, ours_s in medians.items():
                if fault in ("killed node", "killed worker"):
                    print(f"\ntorchrun takes {median_s / ours_s:.0f} times as long to its next step as a {fault} here")


def _row(fault: str, outcomes: Sequence[Outcome]) -> str:
    """A line of the table."""
    stalls = [outcome.stall_s for outcome in outcomes]
    stall_s, next_s = statistics.median(stalls), statistics.median(outcome.next_step_s for outcome in outcomes)
    step_s = statistics.median(outcome.step_s for outcome in outcomes)
    meets = _FAULTS[fault].meets(stall_s, next_s, step_s)
    cells = (
        fault,
        len(outcomes),
        f"{stall_s:.3f} ({max(stalls):.3f})",
        f"{next_s:.3f}",
        f"{step_s:.3f}",
        _FAULTS[fault].target,
        "yes" if meets else "no",
        sum(outcome.steps_lost for outcome in outcomes),
        min(outcome.nodes for outcome in outcomes),
        min(outcome.kept for outcome in outcomes),
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()

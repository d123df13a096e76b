"""Runs `oobleck up` as a user would: a process of its own, real agents and workers, a summary to read."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from oobleck.control.journal import PlanCause
from oobleck.errors import ExitCode
from oobleck.runtime.files.agent_dir import AgentDir
from oobleck.runtime.files.process_id import ProcessId
from oobleck.runtime.files.run_dir import RunDirectory
from tests.processes import words_of

TAG = "e2e"
"""All runs here share it, and so a fork server that has imported torch already."""

RUN_TIMEOUT_S = 240.0

OF_SLOW_NODES = (PlanCause.SLOW.value, PlanCause.RETRIED.value)

SHORT_LEASE = ("--set", "control.lease_s=3")
"""As by default. Other runs here have a longer one: on a busy machine an agent may have no time for that long."""

GPT2 = """\
tag: e2e
model: {type: gpt2, n_embd: 32, n_layer: 4, n_head: 2}
"""
LLAMA = """\
tag: e2e
model: {type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 2,
        num_key_value_heads: 1}
"""
COMMON = """\
data: {paths: [TEXT], sequence_length: 32, vocab_size: 300}
max_steps: 24
global_batch_size: 16
microbatch_size: 2
num_pipelines: 2
dtype: float64
torch_threads: 1
control: {orphan_timeout_s: 30, lease_s: 10, start_timeout_s: 200}
optimizer: {learning_rate: 0.003, warmup_steps: 4}
checkpoint: {enabled: false}
"""


@dataclass(frozen=True)
class Outcome:
    """How a run of `oobleck up` ended."""

    exit_code: int
    output: str
    summary: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        losses: list[float] = self.summary["losses"]
        return losses

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """All but those for the sake of a slow node: on a machine that others use as well, one may be slow."""
        return [recovery for recovery in self.summary["recoveries"] if recovery["cause"] not in OF_SLOW_NODES]


@dataclass
class Up:
    """A run of `oobleck up` under way."""

    process: subprocess.Popen[str]
    summary_path: Path
    output: list[str] = field(default_factory=list)

    def wait_for(self, text: str, *, timeout_s: float = RUN_TIMEOUT_S) -> str:
        """Read output up to a line that holds `text`; returns the line."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            line = self.process.stdout.readline()
            if not line:
                break
            self.output.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never said:\n{''.join(self.output)}")

    def wait_for_loss(self, node: str) -> str:
        """Read output up to the line of the plan without a node; on a busy machine it may also name slow ones."""
        planned = re.compile(rf"\b{re.escape(node)}(, [\w.-]+)* lost[,;] ")
        while not planned.search(line := self.wait_for(" lost")):
            pass
        return line

    def wait_until_said(self, text: str) -> None:
        """Like `wait_for`; what was read already counts as well: it may have been said at any time since the start."""
        if not any(text in line for line in self.output):
            self.wait_for(text)

    def wait_for_step(self, step: int) -> None:
        """Read output up to a line that tells of this step or a later one: lines about steps are thinned."""
        while self._next_step() < step:
            pass

    def wait_for_steps(self, count: int) -> None:
        """Read output up to a line that tells of `count` steps more than the next line about steps does.

        The last line that was read may be of long ago, and a master that takes over has told of no step yet.
        """
        self.wait_for_step(self._next_step() + count)

    def _next_step(self) -> int:
        """Read output up to a line about a step; returns its number."""
        return int(self.wait_for("] step ").split("] step ")[1].split("/")[0])

    def wait_for_checkpoint(self, step: int) -> None:
        """Read output up to a line that tells of a checkpoint of this step or a later one: none is begun in another."""
        while int(self.wait_for("] checkpoint of step ").split("] checkpoint of step ")[1].split(":")[0]) < step:
            pass

    def finish(self, *, timeout_s: float = RUN_TIMEOUT_S) -> Outcome:
        """Wait for the end."""
        try:
            rest, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            rest, _ = self.process.communicate()
            raise AssertionError(f"it has not ended within {timeout_s:g} s:\n{''.join([*self.output, rest])}") from None
        self.output.append(rest)
        summary = json.loads(self.summary_path.read_text()) if self.summary_path.exists() else {}
        return Outcome(self.process.returncode, "".join(self.output), summary)


class Runner:
    """Starts runs that share a base directory, a job file and a warm fork server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base_dir = directory / "base"
        # In a place of its own, so that runs on one machine do not meet; short, for sockets' paths are.
        self.temporary = Path(tempfile.mkdtemp(prefix="ob"))
        self._text = directory / "text.txt"
        self._text.write_text(_text(), encoding="utf-8")
        self._count = 0
        self._warm: socket.socket | None = None

    def job_file(self, head: str = GPT2) -> Path:
        """Write a job file: a small model, a small text."""
        path = self.directory / f"{head.split('type: ')[1].split(',')[0]}.yaml"
        path.write_text(head + COMMON.replace("TEXT", str(self._text)), encoding="utf-8")
        return path

    @contextmanager
    def up(self, *options: str, nodes: Sequence[str] = ("--local", "4"), within: Sequence[str] = ()) -> Iterator[Up]:
        """Start `oobleck up`, by the command `within` if there is one; whatever happens, nothing of it is left."""
        self._count += 1
        summary = self.directory / f"summary{self._count}.json"
        command = [sys.executable, "-m", "oobleck", "up", *nodes, "--base-dir", str(self.base_dir), "--plain"]
        with self._started([*within, *command, "--summary", str(summary), *options]) as process:
            try:
                yield Up(process, summary)
            except BaseException:
                self._clear(process)  # one failure is enough: the next test is not to find what this one has left
                raise
            else:
                if process.poll() is None:
                    self._clear(process)
                elif process.returncode in (ExitCode.FAILED, ExitCode.RESUMABLE, ExitCode.CONFIG):
                    shutil.rmtree(self.memory, ignore_errors=True)  # kept by lost nodes for a next run, on purpose

    def _clear(self, process: subprocess.Popen[str]) -> None:
        """Remove all of a run: the next one is not to take over what goes on without its master."""
        process.kill()
        process.wait()
        for left in self.processes():
            send_signal(left.pid, signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)
        for node in self.agent_directory("any").parent.glob("*/"):
            shutil.rmtree(node, ignore_errors=True)

    @contextmanager
    def background(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start an `oobleck` command that is itself a run, or starts one; nothing of it is left running."""
        with self._started([sys.executable, "-m", "oobleck", *arguments]) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()

    @contextmanager
    def _started(self, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """Start a command that is a run, whose fork server is kept for the next. Who calls this ends it."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=self.environment,
        )
        warming = threading.Thread(target=self._keep_warm, args=(process,))
        warming.start()
        try:
            yield process
        finally:
            assert process.stdout is not None
            process.stdout.close()
            warming.join()

    @property
    def environment(self) -> dict[str, str]:
        """What runs see; their agents and workers inherit it, which is how they are told from others'."""
        return {**os.environ, "TMPDIR": str(self.temporary)}

    def run(self, *options: str, nodes: Sequence[str] = ("--local", "4")) -> Outcome:
        """Run to the end."""
        with self.up(*options, nodes=nodes) as up:
            return up.finish()

    def _keep_warm(self, process: subprocess.Popen[str]) -> None:
        """Become a client of the run's fork server, so that the next run need not import torch again."""
        path = str(self._fork_server)
        while self._warm is None and process.poll() is None:
            client = socket.socket(socket.AF_UNIX)
            try:
                client.connect(path)
                self._warm = client
            except OSError:
                client.close()
                time.sleep(0.2)

    def kill_fork_server(self) -> None:
        """Kill it if there is one, warm as it is; the next run keeps another one."""
        noted = ProcessId.read(self._fork_server.with_name("fork.pid"))
        if noted is not None:
            noted.send(signal.SIGKILL)
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    @property
    def _fork_server(self) -> Path:
        return self.agent_directory("any").with_name("fork.sock")

    def agent_directory(self, node: str) -> Path:
        """Where a node's agent keeps its socket and the ids of its processes."""
        run_id = RunDirectory(base_dir=self.base_dir, tag=TAG).run_id
        return self.temporary / f"oobleck-{os.getuid()}" / run_id / node

    def pids(self, node: str, processes: str = "*") -> list[int]:
        """Ids of a node's `agent`, of its `worker0`, or of all whose names match a pattern, as its agent noted them."""
        files = sorted(self.agent_directory(node).glob(f"{processes}.pid"))
        return [noted.pid for noted in map(ProcessId.read, files) if noted is not None and noted.lives]

    def signal(self, node: str, processes: str = "*", number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a node's agent and workers, or those whose names match. Some may end with another."""
        for pid in self.pids(node, processes):
            send_signal(pid, number)

    def processes(self) -> list[psutil.Process]:
        """Living processes of runs: masters, agents, workers and fork servers, but for the warm one."""
        found = processes_with(f"TMPDIR={self.temporary}")
        warm = _fork_servers(found)
        if self._warm is not None and warm:
            found.remove(warm[0])
        return found

    def fork_servers(self) -> list[int]:
        """Ids of the processes that fork workers."""
        return [server.pid for server in _fork_servers(processes_with(f"TMPDIR={self.temporary}"))]

    def boot(self) -> None:
        """Leave what a machine has after a power cut: its disk, and nothing in memory or in temporary files."""
        self.kill_fork_server()
        shutil.rmtree(self.memory)
        shutil.rmtree(self.agent_directory("any").parents[1])

    def forget_checkpoints(self) -> None:
        """Remove what runs have saved below the base directory."""
        for checkpoints in self.base_dir.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)

    def files(self) -> list[str]:
        """What runs have left in memory, and, but for the warm fork server and torch's cache, in files."""
        warm: set[Path] = set()
        if self._warm is not None:
            server = self._fork_server
            warm = {server, server.with_name("fork.pid"), *server.parents}
            for module in self.temporary.glob(
                "*/_remote_module_non_scriptable.py"
            ):  # torch 2.9 writes it when imported
                warm |= {module, module.parent}
        left = [path.relative_to(self.temporary) for path in self.temporary.rglob("*") if path not in warm]
        left_there = sorted(str(path) for path in left if not path.parts[0].startswith("torchinductor_"))
        return [*left_there, *map(str, sorted(self.memory.rglob("*")))]

    @property
    def memory(self) -> Path:
        """Where runs keep states in memory."""
        run_id = RunDirectory(base_dir=self.base_dir, tag=TAG).run_id
        return AgentDir(run_id, "any").memory.parent

    def left_over(self, *, timeout_s: float = 5.0) -> list[str]:
        """Processes and files that runs have left behind, after some time for ends that are under way."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and (self.processes() or self.files()):
            time.sleep(0.05)
        return [*(" ".join(words_of(process)) for process in self.processes()), *self.files()]

    def journal(self) -> list[dict[str, Any]]:
        """The entries of the newest run, as they stand in its file."""
        path = self.base_dir / TAG / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        """End the warm fork server, and see that nothing is left then."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None
        left = self.left_over(timeout_s=30.0)
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.memory, ignore_errors=True)
        assert not left, left
        shutil.rmtree(self.temporary)


def oobleck(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run another `oobleck` command, as from a second terminal."""
    return subprocess.run(
        [sys.executable, "-m", "oobleck", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_everything(runner: Runner, up: Up) -> None:
    """SIGKILL to master, agents and workers, as a power cut would, but for the memory.

    The master comes first, and all are stopped before any is killed: one that sees others die ends by itself, and what
    the nodes keep in memory is given back.
    """
    processes = sorted(runner.processes(), key=_is_no_child)
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.Error):
                act(process)
    deadline_s = time.monotonic() + 20.0
    while runner.processes():
        assert time.monotonic() < deadline_s, runner.processes()
        time.sleep(0.02)
    up.process.wait()  # it may still have threads that end, and seem to go on to those who ask


def _is_no_child(process: psutil.Process) -> bool:
    """Whether a process is not the master, which this one started."""
    with suppress(psutil.Error):
        return process.ppid() != os.getpid()
    return True


def incidents(runner: Runner) -> list[dict[str, Any]]:
    """What `oobleck events` tells of the newest run."""
    done = oobleck("events", TAG, "--json", "--base-dir", str(runner.base_dir))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def worker_pids(runner: Runner) -> dict[str, int]:
    """The process id of each node's worker, by the newest journal."""
    lines = (runner.base_dir / TAG / "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["node"]: entry["pid"] for entry in entries if entry["@type"] == "WorkerUp"}


def started_at(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None when it does not live. Tells reused ids apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def processes_with(variable: str) -> list[psutil.Process]:
    """Living processes in whose environment `variable` (NAME=value) was set when they began."""
    name, _, value = variable.partition("=")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _fork_servers(found: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not been forked themselves: workers bear the command line of the server that forked them."""
    servers = [process for process in found if "oobleck.training.process.worker_server" in words_of(process)]
    first = []
    for process in servers:
        with suppress(psutil.NoSuchProcess):
            if process.ppid() not in {server.pid for server in servers}:
                first.append(process)
    return first


def _text() -> str:
    """A text that is the same on every machine: numbers spelled out, with some structure to learn."""
    units = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return "\n".join(
        f"{number} is {' '.join(units[int(digit)] for digit in str(number))}, and twice that is {2 * number};"
        for number in range(4000)
    )

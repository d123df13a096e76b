"""Trains a job's first steps twice: in a process without Oobleck, and by `oobleck up` on virtual nodes.

All files of both are in a directory of their own, which is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.cli.inputs import JobSource
from oobleck.control import verification
from oobleck.control.journal import JobEnded, StepDone
from oobleck.control.verification import compare
from oobleck.errors import ConfigError, ExitCode, ResourceLost
from oobleck.host.script import SCRIPT_WAITS
from oobleck.job import JobSpec
from oobleck.runtime.files import AgentDir, RunDirectory
from oobleck.runtime.journals import read_journal
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import decode_json, encode_json

_LAST_LINES = 15
_BLAMES = ("oobleck: ", "Error: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The job to train both ways."""

    job: JobSpec
    source: JobSource
    num_steps: int
    num_nodes: int
    began_s: float
    """The wall clock before the script's first run."""

    @property
    def name(self) -> str:
        return str(self.source.script or self.source.file or "the default job")

    @property
    def killed(self) -> tuple[str, int] | None:
        """The node that is killed, and the step after which; None if none can be lost."""
        if self.num_nodes < 3 or self.num_steps < 2:
            return None
        return f"node{self.num_nodes - 1}", self.num_steps // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    exit_code: ExitCode
    plain: verification.PlainAccount
    comparison: verification.Comparison | None = None
    tensors: verification.TensorsCompared | None = None
    problem: str = ""
    """The reason why there is no comparison."""


def is_of_trainer(job: JobSpec) -> bool:
    """Return whether a job comes from a script that calls `train()`."""
    return job.script is not None and "live_model" in job.script.provides


def train_both_ways(asked: Asked, *, tell: Callable[[str], None]) -> Outcome:
    """Train both ways; `tell` reports when each begins. Raises ResourceLost if a process ends without an answer."""
    with _directory() as directory, closing(_PlainProcess(asked, directory)) as plain:
        tell(f"{asked.num_steps} steps by itself, in one process")
        account = plain.train()
        if account.problem:
            code = ExitCode.CONFIG if account.is_refused else ExitCode.FAILED
            return Outcome(exit_code=code, plain=account, problem=f"by itself: {account.problem}")
        tell(f"{asked.num_steps} steps on {asked.num_nodes} virtual nodes")
        run = _RunOnNodes(asked, directory)
        try:
            code = run.train()
        finally:
            _remove_output_dir(account, since_s=asked.began_s)
        if code != ExitCode.DONE:
            return Outcome(exit_code=code, plain=account, problem=f"on the nodes: {run.problem()}")
        tensors = plain.compare(run.checkpoints)
        comparison = compare(account, run.steps(), tensors.tensors, verification.tolerance_of(asked.job.dtype))
        code = ExitCode.DONE if comparison.are_equal and not tensors.problem else ExitCode.DIFFERENT
        return Outcome(exit_code=code, plain=account, comparison=comparison, tensors=tensors, problem=tensors.problem)


@contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="oobleck-verify-"))
    before = signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: wait for processes, and remove files
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> None:
    raise SystemExit(ExitCode.TERMINATED)


# --- by itself -------------------------------------------------------------------------------------------------


class _PlainProcess:
    """The process that trains without Oobleck, and keeps its model for the comparison."""

    def __init__(self, asked: Asked, directory: Path) -> None:
        self._asked = asked
        self._directory = directory
        self._log = directory / "plain.log"
        module = "oobleck.transformers.plain_host" if is_of_trainer(asked.job) else "oobleck.training.plain.job_host"
        environment = as_no_rank(os.environ)  # accelerate would follow a rank's variables
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers would train on all, with larger batches
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                module_command(module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
            )

    def close(self) -> None:
        self._process.kill()
        # Only its end is waited for: processes that the script has forked hold its output as well.
        self._process.wait()
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(BrokenPipeError):
                stream.close()

    def train(self) -> verification.PlainAccount:
        job = verification.PlainJob(
            job=self._asked.job, num_steps=self._asked.num_steps, directory=str(self._directory)
        )
        return decode_json((verification.PlainAccount,), self._answer(encode_json(job)))

    def compare(self, checkpoints: Path) -> verification.TensorsCompared:
        asked = encode_json(verification.TensorsAsked(checkpoints=str(checkpoints)))
        return decode_json((verification.TensorsCompared,), self._answer(asked))

    def _answer(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise ResourceLost(f"the script by itself ended with the exit code {code}\n{_tail(self._log)}")
        return answer


# --- on nodes --------------------------------------------------------------------------------------------------


class _RunOnNodes:
    def __init__(self, asked: Asked, directory: Path) -> None:
        self._asked = asked
        self._base_dir = directory / "runs"
        self._run = RunDirectory(base_dir=self._base_dir, tag=f"verify-{os.getpid()}")
        self._log = directory / "up.log"
        self.checkpoints = directory / "checkpoints"

    def train(self) -> ExitCode:
        """Run to the end; return how it ended."""
        with self._log.open("wb") as output:
            process = subprocess.Popen(
                module_command("oobleck", "up", *self._words()),
                stdin=subprocess.PIPE,  # the run ends with this process
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, SCRIPT_WAITS: "1"},
            )
        try:
            code = process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
            for node in range(self._asked.num_nodes):  # a failed run keeps states for the next one of its tag
                shutil.rmtree(AgentDir(self._run.run_id, f"node{node}").memory.parent, ignore_errors=True)
        known = {int(each) for each in ExitCode}
        return ExitCode(code) if code in known else ExitCode.FAILED

    def _words(self) -> list[str]:
        asked, killed = self._asked, self._asked.killed
        own = {
            # Dropout draws other numbers on nodes than in one process.
            "dropout": "false",
            "checkpoint.enabled": "true",
            "checkpoint.directory": str(self.checkpoints),
            # Only a second pipeline has the layers of the node that is killed.
            **({} if asked.job.num_pipelines else {"num_pipelines": "1" if killed is None else "2"}),
        }
        return [
            *(() if asked.source.script is None else (str(asked.source.script),)),
            *(f"--set={setting}" for setting in asked.source.settings),
            *(f"--set={key}={value}" for key, value in own.items()),
            *(() if asked.source.file is None else (f"--job={asked.source.file}",)),
            f"--local={asked.num_nodes}",
            f"--steps={asked.num_steps}",
            f"--dtype={asked.job.dtype}",
            f"--tag={self._run.tag}",
            f"--base-dir={self._base_dir}",
            "--save-every=1",
            f"--keep={asked.num_steps + 1}",
            "--scaling=all",
            "--resume=never",
            "--plain",
            "--until-eof",
            *(
                ("--fault-threshold=0",)
                if killed is None
                else ("--fault-threshold=1", f"--kill={killed[0]}@{killed[1]}")
            ),
            *(("--", *asked.job.script.arguments) if asked.job.script is not None else ()),
        ]

    def steps(self) -> list[verification.StepAccount]:
        records = [entry.record for entry in read_journal(self._run.journal) if isinstance(entry, StepDone)]
        return [
            verification.StepAccount(
                step=record.step, loss=record.loss, grad_norm=record.grad_norm, learning_rate=record.learning_rate
            )
            for record in records
        ]

    def problem(self) -> str:
        with suppress(ConfigError):
            ended = [entry for entry in read_journal(self._run.journal) if isinstance(entry, JobEnded)]
            if ended:
                return ended[-1].reason
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        blamed = next((index for index, line in enumerate(lines) if line.startswith(_BLAMES)), None)
        return _tail(self._log) if blamed is None else "\n".join(lines[blamed:]).removeprefix("oobleck: ")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])


def _remove_output_dir(account: verification.PlainAccount, *, since_s: float) -> None:
    """Remove the directory that a Trainer's constructor makes, unless it was there before."""
    if not account.output_dir:
        return
    path = Path(account.output_dir)
    with suppress(OSError):
        if path.stat().st_mtime >= since_s:
            path.rmdir()  # which fails if it holds anything

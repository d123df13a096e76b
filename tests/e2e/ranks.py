"""Runs `oobleck run` as a user would, and reads what the ranks of a script have noted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from oobleck.runtime.files import AgentDir, RunDirectory
from oobleck.runtime.journals import read_journal
from tests.e2e.harness import processes_with
from tests.processes import words_of

__all__ = ["SCRIPT", "TIMEOUT_S", "Ranks"]

SCRIPT = Path(__file__).with_name("ddp_script.py")
TIMEOUT_S = 600.0


class Ranks:
    """Runs of scripts, whose processes are told from others' by their temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.out = directory / "out"
        self.out.mkdir()
        self.base_dir = directory / "base"
        self.temporary = Path(tempfile.mkdtemp(prefix="obr"))
        self.stdout = directory / "stdout"
        self.stderr = directory / "stderr"
        self._notes: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        """What was read of each rank's notes, and up to which byte."""

    @contextmanager
    def started(
        self, *options: str, command: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start `oobleck run`; nothing of it is left afterwards."""
        words = [*options, "--base-dir", str(self.base_dir), "--tag", "ranks", *command]
        with self.stdout.open("wb") as stdout, self.stderr.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "oobleck", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**self.environment, **(environment or {})},
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(TIMEOUT_S)

    @property
    def environment(self) -> dict[str, str]:
        """What runs see."""
        return {**os.environ, "TMPDIR": str(self.temporary)}

    def run(self, *options: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Run to the end; returns the exit status."""
        with self.started(*options, command=command, environment=environment) as process:
            return process.wait(TIMEOUT_S)

    def count(self, steps: int) -> list[str]:
        """A script without torch, and its arguments."""
        return [str(SCRIPT.with_name("plain_script.py")), str(self.out), str(steps)]

    def train(self, steps: int) -> list[str]:
        """The DDP script, and its arguments."""
        return [str(SCRIPT), str(self.out), str(steps)]

    def notes(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has noted so far."""
        path = self.out / f"log.{rank}"
        if not path.exists():
            self._notes.pop(rank, None)
            return []
        read, notes = self._notes.get(rank, (0, []))
        if path.stat().st_size < read:  # it is another one, since a test has removed it
            read, notes = 0, []
        with path.open("rb") as log:
            log.seek(read)
            lines = log.read().rpartition(b"\n")[0]
        if lines:
            notes = notes + [json.loads(line) for line in lines.splitlines()]
            self._notes[rank] = read + len(lines) + 1, notes
        return notes

    def said(self) -> str:
        """What the command has written on standard error."""
        return self.stderr.read_text()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a run is to bring about."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.05)

    def wait_for_step(self, step: int, *, restarts: int = 0, rank: int = 0) -> dict[str, Any]:
        """Wait until a rank has taken a step, in the generation after so many restarts or a later one."""
        found: list[dict[str, Any]] = []

        def has_come() -> bool:
            found[:] = [note for note in self.notes(rank) if note["restarts"] >= restarts and note["step"] >= step]
            return bool(found)

        self.wait_until(has_come)
        return found[0]

    def fork_servers(self) -> list[psutil.Process]:
        """The processes that fork ranks, but not what they have forked."""
        return [
            process
            for process in processes_with(f"TMPDIR={self.temporary}")
            if "oobleck.training.process.rank_server" in words_of(process) and not process.name().startswith("oobleck-")
        ]

    def entries(self, kind: str) -> list[Any]:
        """The entries of a kind in the run's journal."""
        journal = self.base_dir / "ranks" / "journal.jsonl"
        return [entry for entry in read_journal(journal) if type(entry).__name__ == kind]

    def close(self) -> None:
        """See that nothing is left."""
        mark = f"TMPDIR={self.temporary}"
        memory = AgentDir(RunDirectory(base_dir=self.base_dir, tag="ranks").run_id, "any").memory.parent
        deadline_s = time.monotonic() + 30
        while ((left := processes_with(mark)) or memory.exists()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for process in left:
            process.kill()
        states = list(memory.rglob("*"))
        shutil.rmtree(memory, ignore_errors=True)
        files = [str(path) for path in self.temporary.rglob("*") if path.is_file() or path.is_socket()]
        directories = list(self.temporary.glob("oobleck-*/**"))
        shutil.rmtree(self.temporary)
        assert not left
        assert states == []
        assert directories == []
        assert [file for file in files if "torchinductor" not in file and "_remote_module" not in file] == []

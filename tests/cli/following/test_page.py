"""`oobleck ui` as a process, over a real HTTP client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.control.journal import JournalEntry
from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.runtime.journals import JournalWriter, set_aside
from tests.control.journals import run_with_a_loss


@contextmanager
def followed(base_dir: Path, *words: str) -> Iterator[str]:
    """The address that `oobleck ui` prints; it ends by Ctrl-C, and well."""
    command = [sys.executable, "-m", "oobleck", "ui", "--base-dir", str(base_dir), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def append(run: RunDirectory, entries: list[JournalEntry]) -> None:
    with JournalWriter(run.journal) as writer:
        for entry in entries:
            writer.append(entry)


def test_the_page_follows_the_run_its_master_and_the_next_run_of_its_tag(tmp_path, capsys):
    run = RunDirectory(base_dir=tmp_path, tag="gpt2-demo")
    run.path.mkdir()
    entries = list(run_with_a_loss(steps=20, lost_at=5))
    middle = len(entries) // 2  # between two plans, so that the second one is read as changes of the first
    append(run, entries[:10])
    with followed(tmp_path) as url:
        assert "20 of 20" not in get(url)
        append(run, entries[10:middle])
        assert "node3: contact was lost" in get(url)
        lock, here = run.path / "lock", ProcessId.of(os.getpid())
        lock.write_text(str(replace(here, boot="another")))
        assert "continues" in get(url), "nothing is known of a master on another machine"
        lock.write_text(str(replace(here, started_ticks=0)))
        assert "has lost its master; <code>oobleck resume gpt2-demo</code> takes it over" in get(url)
        append(run, entries[middle:])
        assert "20 of 20" in get(url)
        set_aside(run.journal)
        assert "20 of 20" in get(url), "until there is something newer"
        append(run, list(run_with_a_loss(steps=33, lost_at=2)))
        assert "33 of 33" in get(url)
        with run.journal.open("ab") as file:
            file.write(b"{}\n")
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            get(url)
        assert "journal.jsonl, line" in caught.value.read().decode()
    assert main(["ui", "--base-dir", str(tmp_path)]) == 78
    assert "journal.jsonl, line" in capsys.readouterr().err

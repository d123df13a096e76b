from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.control.summary import summarize
from oobleck.errors import ConfigError
from oobleck.runtime.journal_file import JournalWriter, read_journal, set_aside
from tests.control.journals import committed, run_with_a_loss

ENTRIES = tuple(run_with_a_loss())

WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
from oobleck.runtime.journal_file import JournalWriter
from tests.control.journals import committed
journal = JournalWriter(Path(sys.argv[1]))
for step in range(1, 10**9):
    journal.append(committed(float(step), step))
    print(step, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, entries) -> None:
    with JournalWriter(path) as journal:
        for entry in entries:
            journal.append(entry)


def test_what_was_written_is_read_back_equal(path):
    write(path, ENTRIES)
    assert tuple(read_journal(path)) == ENTRIES
    assert summarize(read_journal(path)) == summarize(ENTRIES)


def test_a_journal_is_its_users_alone(path):
    write(path, ENTRIES[:1])
    assert path.stat().st_mode & 0o777 == 0o600


def test_entries_can_be_read_before_the_writer_closes(path):
    with JournalWriter(path) as journal:
        journal.append(ENTRIES[0])
        assert tuple(read_journal(path)) == ENTRIES[:1]


def test_a_second_writer_goes_on_where_the_first_ended(path):
    write(path, ENTRIES[:5])
    write(path, ENTRIES[5:])
    assert tuple(read_journal(path)) == ENTRIES


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_left_out_and_then_removed(path, cut):
    write(path, ENTRIES[:9])
    os.truncate(path, path.stat().st_size - cut)
    assert tuple(read_journal(path)) == ENTRIES[:8]
    write(path, ENTRIES[8:])
    assert tuple(read_journal(path)) == ENTRIES


def test_a_torn_line_longer_than_the_search_is_removed(path):
    write(path, ENTRIES[:2])
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    write(path, ENTRIES[2:4])
    assert tuple(read_journal(path)) == ENTRIES[:4]


def test_a_file_of_one_torn_line_starts_anew(path):
    path.write_bytes(b'{"@type"')
    write(path, ENTRIES[:1])
    assert tuple(read_journal(path)) == ENTRIES[:1]


def test_a_broken_line_in_the_middle_is_named(path):
    write(path, ENTRIES[:4])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"@type":"Nonsense"}\n', *lines[2:]]))
    with pytest.raises(ConfigError, match=r"journal\.jsonl, line 3: "):
        tuple(read_journal(path))


def test_a_missing_journal_is_a_config_error(path):
    with pytest.raises(ConfigError, match="No such file"):
        tuple(read_journal(path))
    with pytest.raises(ConfigError, match="No such file"):
        JournalWriter(path.parent / "none" / "journal.jsonl")


def test_entries_told_before_a_kill_are_all_there(path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}
    ) as writer:
        while (told := int(writer.stdout.readline())) < 200:
            pass
        writer.send_signal(signal.SIGKILL)
    steps = [entry.record.step for entry in read_journal(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= told


def test_a_full_disk_leaves_a_true_beginning_and_does_not_stop_the_run(path, caplog):
    """A limit on the size of files stands in for a full disk."""
    previous_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JournalWriter(path) as journal:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
            for step in range(1, 100):
                journal.append(committed(float(step), step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, previous_signal)
        journal.append(committed(100.0, 100))
    assert journal.failure is not None
    assert "the run goes on without it" in caplog.text
    steps = [entry.record.step for entry in read_journal(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert 3 < len(steps) < 99
    assert path.read_bytes().endswith(b"\n")


def test_older_journals_are_set_aside_in_order(path):
    assert set_aside(path) is None
    for run in (1, 2, 3):
        write(path, ENTRIES[:run])
        assert set_aside(path) == path.with_name(f"journal.{run}.jsonl")
    assert len(tuple(read_journal(path.with_name("journal.2.jsonl")))) == 2
    assert not path.exists()

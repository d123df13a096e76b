from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oobleck.control.journal import JournalGap, StepDone
from oobleck.control.journal.summary import summarize
from oobleck.errors import ConfigError
from oobleck.runtime.journals import follow_journal
from oobleck.runtime.journals.journal_file import JournalWriter, aside_of, put_back, read_journal, set_aside
from tests.control.journals import committed, run_with_a_loss
from tests.disks import fill, small_disk

ENTRIES = tuple(run_with_a_loss())

WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
from oobleck.runtime.journals.journal_file import JournalWriter
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
    root = Path(__file__).parents[3]
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


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """A limit on the size of files stands in for a full disk."""
    previous_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous_signal)


def steps_in(path: Path) -> list[int]:
    return [entry.record.step for entry in read_journal(path) if isinstance(entry, StepDone)]


def gaps_in(path: Path) -> list[JournalGap]:
    return [entry for entry in read_journal(path) if isinstance(entry, JournalGap)]


def test_a_disk_that_takes_nothing_for_a_while_costs_the_journal_nothing(path, caplog):
    told: list[JournalGap] = []
    with JournalWriter(path, tell=told.append) as journal:
        with files_limited_to(5000):
            for step in range(1, 100):
                journal.append(committed(float(step), step))
        assert journal.num_missing > 0
        there = steps_in(path)
        assert there == list(range(1, len(there) + 1))
        assert 3 < len(there) < 99
        assert path.read_bytes().endswith(b"\n")
    assert journal.num_missing == 0
    assert steps_in(path) == list(range(1, 100))
    over = gaps_in(path)[-1]
    assert (over.since_s, over.num_late, over.num_lost) == (len(there) + 1.0, 99 - len(there), 0)
    assert [gap.is_open for gap in told] == [True, False]
    assert str(path) in caplog.text


def test_a_journal_on_a_full_disk_says_that_it_is_cut_off(tmp_path):
    """With a real disk: what it has looks like a shorter run, and is not to be taken for one."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        path = disk / "journal.jsonl"
        with JournalWriter(path) as journal:
            for step in range(1, 10):
                journal.append(committed(float(step), step))
            filler = fill(disk)
            step = 10
            while journal.num_missing < 3:
                journal.append(committed(float(step), step))
                step += 1
            (gap,) = gaps_in(path)
            assert gap.is_open
            assert "No space left on device" in gap.sentence
            filler.unlink()
        begun, over = gaps_in(path)
        assert begun == gap
        assert (over.is_open, over.num_lost) == (False, 0)
        assert steps_in(path) == list(range(1, step))


def test_more_than_is_kept_is_counted_and_steps_go_first(path):
    with JournalWriter(path, max_bytes=3000) as journal, files_limited_to(2000):
        for step in range(1, 40):
            journal.append(committed(float(step), step))
        journal.append(ENTRIES[0])
    lost = gaps_in(path)[-1].num_lost
    assert lost > 0
    assert journal.num_missing == lost
    entries = list(read_journal(path))
    assert ENTRIES[0] in entries, "what a new master cannot do without is kept longest"
    assert len(steps_in(path)) == 39 - lost


def test_what_was_removed_is_made_again_with_all_that_it_had(path):
    with JournalWriter(path) as journal:
        for step in range(1, 10):
            journal.append(committed(float(step), step))
        assert journal.is_there
        shutil.rmtree(path.parent)
        assert not journal.is_there
        journal.append(committed(10.0, 10))
        path.parent.mkdir()
        journal.restore()
        journal.append(committed(11.0, 11))
    assert steps_in(path) == list(range(1, 12))


def test_who_follows_a_journal_is_not_confused_by_a_line_that_is_cut_off(path):
    write(path, ENTRIES[:2])
    followed = follow_journal(path)
    assert [next(followed), next(followed)] == list(ENTRIES[:2])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"@type":"StepD')
    assert next(followed) is None
    path.write_bytes(whole)
    write(path, ENTRIES[2:3])
    assert next(followed) == ENTRIES[2]


def test_older_journals_are_set_aside_in_order(path):
    assert set_aside(path) is None
    for run in (1, 2, 3):
        write(path, ENTRIES[:run])
        assert set_aside(path) == path.with_name(f"journal.{run}.jsonl")
    assert len(tuple(read_journal(path.with_name("journal.2.jsonl")))) == 2
    assert not path.exists()


def test_a_run_that_did_nothing_leaves_the_journal_before_where_it_was(path):
    write(path, ENTRIES[:3])
    before = aside_of(path)
    set_aside(path)
    write(path, ENTRIES[:1])
    put_back(path, before)
    assert tuple(read_journal(path)) == ENTRIES[:3]
    put_back(path, before)
    assert tuple(read_journal(path)) == ENTRIES[:3]

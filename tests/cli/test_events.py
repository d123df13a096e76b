"""`oobleck events` and `oobleck report` on journals of runs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.control.journal import JournalEntry
from oobleck.wire import encode_json
from tests.control.journals import run_with_a_loss


def write_journal(base_dir: Path, tag: str, entries: Iterable[JournalEntry]) -> Path:
    path = base_dir / tag / "journal.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(map(encode_json, entries)))
    return path


def test_failures_are_told_in_words_and_as_json(tmp_path, capsys):
    write_journal(tmp_path, "job", run_with_a_loss())
    assert main(["events", "job", "--base-dir", str(tmp_path)]) == 0
    assert "node3: contact was lost" in capsys.readouterr().out
    assert main(["events", "job", "--json", "--base-dir", str(tmp_path)]) == 0
    (incident,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert incident["root"]["failure"] == "contact_lost"
    assert incident["lost"] == ["node3"]
    assert incident["root"]["evidence"] == "its connection was lost"
    assert incident["root"]["entry"]["loss"] == {"@type": "ConnectionLost"}
    assert [response["measure"] for response in incident["responses"]] == ["node_left_out", "plan_changed"]
    assert incident["remedies"] == ["reach_machine", "is_tried_again"]
    assert incident["advice"]


def test_a_run_in_which_nothing_happened_says_so(tmp_path, capsys):
    entries = list(run_with_a_loss())[:10]
    write_journal(tmp_path, "quiet", entries)
    assert main(["events", "--base-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("command", ["events", "report"])
def test_the_run_may_be_named_by_its_tag_as_an_option(tmp_path, capsys, command):
    older = write_journal(tmp_path, "job", run_with_a_loss())
    write_journal(tmp_path, "newer", list(run_with_a_loss())[:10])
    os.utime(older, (0, 0))
    assert main([command, "--tag", "job", "--base-dir", str(tmp_path)]) == 0
    told = {"events": "node3: contact was lost", "report": str(older.with_name("report.html"))}
    assert told[command] in capsys.readouterr().out


@pytest.mark.parametrize("command", ["events", "report"])
def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path, capsys, command):
    write_journal(tmp_path, "job", run_with_a_loss())
    assert main([command, "jop", "--base-dir", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "jop" in errors
    assert "runs in" in errors
    assert "job" in errors


def test_following_tells_of_a_failure_when_it_begins_and_when_it_is_over(tmp_path, capsys):
    entries = list(run_with_a_loss())
    lost = next(index for index, entry in enumerate(entries) if type(entry).__name__ == "RecoveryStarted")
    path = write_journal(tmp_path, "job", entries[: lost + 1])

    def go_on() -> None:
        time.sleep(0.8)
        with path.open("ab") as journal:
            rest = b"".join(map(encode_json, entries[lost + 1 :]))
            journal.write(rest[:100])
            journal.flush()
            time.sleep(0.3)
            journal.write(rest[100:])

    writer = threading.Thread(target=go_on)
    writer.start()
    assert main(["events", str(path), "--follow"]) == 0
    writer.join()
    told = capsys.readouterr().out
    assert told.count("recovering …") == 1
    assert told.count("0.050 s") == 1


def test_a_report_is_written_beside_the_journal_or_where_it_is_wanted(tmp_path, capsys):
    journal = write_journal(tmp_path, "job", run_with_a_loss())
    assert main(["report", "--base-dir", str(tmp_path)]) == 0
    page = journal.with_name("report.html")
    assert capsys.readouterr().out == f"{page}\n"
    other = tmp_path / "other.html"
    assert main(["report", str(journal), "-o", str(other)]) == 0
    assert other.read_text() == page.read_text()
    assert main(["report", str(journal), "-o", str(tmp_path / "no" / "x.html")]) == 2

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from oobleck.runtime.journals import read_journal
from oobleck.wire import encode_json
from tests.control.journals import adopted, job_started, plan, run_with_a_loss
from tools.pictures import IMAGES, KEPT, excerpt, main, pictures

AGAIN = "draw them again: `python tools/pictures.py`, or with the journal of a new `make demo`"


def words(svg: str) -> str:
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())


def test_the_pictures_of_the_pages_are_those_of_the_journal_that_is_kept():
    drawn = pictures(tuple(read_journal(KEPT)))
    assert {name: (IMAGES / name).read_text(encoding="utf-8") for name in drawn} == drawn, AGAIN


def test_the_dashboard_is_shown_from_before_the_loss_until_after_the_recovery():
    svg = pictures(tuple(run_with_a_loss()))["dashboard.svg"]
    moments = [
        words(ElementTree.tostring(each, "unicode")) for each in ElementTree.fromstring(svg) if each.tag.endswith("g")
    ]
    assert "recoveries 0" in moments[0]
    assert "1 lost" not in moments[0]
    assert all("1 lost" in moment for moment in moments[-3:])
    assert "recoveries 1" in moments[-1]
    assert all(svg.count(f"@keyframes moment{number}{{") == 1 for number in range(len(moments)))
    assert "@font-face" not in svg, "a picture loads nothing"


def test_what_is_kept_of_a_journal_gives_the_same_pictures():
    entries = tuple(run_with_a_loss())
    kept = excerpt(entries)
    assert len(kept) < len(entries)
    assert pictures(kept) == pictures(entries)


def test_a_journal_is_drawn_and_kept_and_one_without_a_loss_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def draw(entries, name: str) -> int:
        (tmp_path / name).write_bytes(b"".join(map(encode_json, entries)))
        monkeypatch.setattr(sys, "argv", ["pictures", str(tmp_path / name), "--output", str(tmp_path)])
        return main()

    assert draw(run_with_a_loss(), "lost") == 0
    assert {"dashboard.svg", "recovery.svg", KEPT.name} <= {path.name for path in tmp_path.iterdir()}
    assert draw([job_started(("node0",)), adopted(1.0, 1, plan(("node0",)))], "whole") == 1
    assert "make demo" in capsys.readouterr().err

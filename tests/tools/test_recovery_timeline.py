from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.control.journal import Action, JournalEntry, LossCause, PlanCause, RecoveryDone
from oobleck.runtime.journals.journal_file import JournalWriter
from tests.control.journals import adopted, committed, job_started, plan
from tools.recovery_timeline import find_recovery, main, recovery_svg

NODES = ("node0", "node1", "node2", "node3")
DONE = RecoveryDone(
    t_s=10.9,
    began_s=10.2,
    generation=2,
    nodes=("node2",),
    cause=PlanCause.LOSS,
    loss=LossCause.CONNECTION_LOST,
    action=Action.REINSTANTIATE,
    detect_s=0.05,
    decide_s=0.03,
    transfer_s=0.02,
    stall_s=0.08,
    bytes_moved=1000,
    layers_moved=3,
    microbatches_redone=1,
    steps_lost=0,
)


@pytest.fixture
def journal() -> list[JournalEntry]:
    """Steps of a second each; node2 dies in the tenth, which is finished at 10.7 s."""
    before = [committed(float(second), second - 1, duration_s=1.0) for second in range(2, 11)]
    after = [committed(second + 0.7, second, duration_s=1.0) for second in range(11, 16)]
    interrupted = committed(10.7, 10, duration_s=0.7)
    return [
        job_started(NODES),
        adopted(1.0, 1, plan(NODES[:2], NODES[2:])),
        *before,
        adopted(10.23, 2, plan(NODES[:2], NODES[3:]), Action.REINSTANTIATE),
        interrupted,
        DONE,
        *after,
    ]


def rectangles(svg: str) -> dict[str, tuple[float, float]]:
    """Left end and width of each bar, by the first words of its tooltip."""
    space = "{http://www.w3.org/2000/svg}"
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{space}rect"):
        title = rect.find(f"{space}title")
        if title is not None and title.text is not None:
            found.setdefault(title.text.split(":")[0], (float(rect.get("x", "")), float(rect.get("width", ""))))
    return found


def test_the_picture_has_the_steps_around_the_recovery_to_scale(journal):
    recovery = find_recovery(journal)
    assert recovery is not None
    assert recovery.ordered_s == 10.23
    bars = rectangles(recovery_svg(recovery))
    names = ["step 8", "step 9", "step 10 (interrupted, finished)", "step 11", "step 12"]
    assert [name for name in bars if name.startswith("step")] == names
    # One second is as wide everywhere, and what lies between two bars is the time between them.
    second = bars["step 8"][1]
    assert bars["step 9"][0] - bars["step 8"][0] == pytest.approx(second, abs=0.2)
    assert bars["step 10 (interrupted, finished)"][1] == pytest.approx(0.7 * second, abs=0.2)
    assert bars["fence and decide"][0] - bars["step 9"][0] == pytest.approx(1.2 * second, abs=0.2)
    assert bars["finish the step, adopt the plan"][1] == pytest.approx(0.67 * second, abs=0.2)


def test_nothing_is_drawn_beyond_the_edges(journal):
    root = ElementTree.fromstring(recovery_svg(find_recovery(journal)))
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(rect.get("x", "0")) <= float(root.get("width")) - float(rect.get("width", "0")) + 0.2


def test_a_name_that_looks_like_markup_is_text(journal):
    index = journal.index(DONE)
    journal[index] = replace(DONE, nodes=("<a&b>",))
    svg = recovery_svg(find_recovery(journal))
    assert "<a&b> lost" in "".join(ElementTree.fromstring(svg).itertext())


def test_a_journal_is_drawn_and_one_without_a_loss_is_refused(journal, tmp_path: Path, monkeypatch, capsys):
    def draw(entries: list[JournalEntry], name: str) -> int:
        with JournalWriter(tmp_path / name) as writer:
            for entry in entries:
                writer.append(entry)
        monkeypatch.setattr(sys, "argv", ["recovery_timeline", str(tmp_path / name), str(tmp_path / f"{name}.svg")])
        return main()

    assert draw(journal, "lost") == 0
    assert ElementTree.parse(tmp_path / "lost.svg").getroot().tag.endswith("svg")
    assert draw(journal[:5], "whole") == 1
    assert str(tmp_path / "whole") in capsys.readouterr().err
    assert not (tmp_path / "whole.svg").exists()

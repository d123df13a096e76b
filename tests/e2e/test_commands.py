"""The commands that the pages show for a run, given to one as they stand there, but for its name.

Its nodes are drained, added, killed, frozen and taken away meanwhile. Single faults are in test_elastic.py.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.errors import ExitCode

from .elastic import (
    ENDLESS,
    PACED,
    SHORT_LEASE,
    Elastic,
    Reference,
    assert_all_is_right,
    assert_cost_its_lease,
    freeze,
    nodes_of,
    recoveries,
)
from .harness import TAG, Runner, started_at, worker_pids
from .shown_commands import AFTERWARDS, ON_A_RUN, WHILE_IT_TRAINS

CHAOS = {
    "version": 1,
    "duration_s": 60,
    "nodes": ["node0"],
    "events": [{"t_s": 30, "kind": "worker_crashed", "node": "node0", "device": 0}],
}


class Terminal:
    """A second terminal; knows what was asked."""

    def __init__(self, runner: Runner, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._runner = runner
        self._directory = directory
        self._capsys = capsys
        self.given: list[str] = []

    def words(self, line: str) -> list[str]:
        assert line in ON_A_RUN
        self.given.append(line)
        words = [TAG if word in ("gpt2-demo", "my-llama") else word for word in shlex.split(line)[1:]]
        has_base = words[:2] != ["checkpoint", "import"]
        return [*words, *(("--base-dir", str(self._runner.base_dir)) if has_base else ())]

    def start(self, line: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oobleck", *self.words(line)]
        return subprocess.Popen(command, cwd=self._directory, stdout=subprocess.PIPE, text=True)

    def give(self, line: str) -> str:
        """Within this process, for each that is started takes a second to begin."""
        self._capsys.readouterr()
        exit_code = main(self.words(line))
        out, err = self._capsys.readouterr()
        assert exit_code == ExitCode.DONE, f"{line}: {out}{err}"
        return out


@pytest.fixture
def terminal(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps(CHAOS))
    return Terminal(runner, tmp_path, capsys)


@pytest.mark.timeout(600)
def test_what_the_pages_show_for_a_run_does_what_they_say_and_each_node_that_goes_or_comes_costs_no_step(
    runner: Runner, terminal: Terminal, tmp_path: Path, endless_reference: Reference
) -> None:
    """And, while it saves, changes no loss."""
    notice = f"grep -qa node3 /proc/$PPID/cmdline && cat {tmp_path}/notice"  # node3 alone is to find it
    settings = (f"control.notice_command={notice}", "control.notice_interval_s=0.5", "control.rejoin_after_s=0")
    given = (*(word for setting in settings for word in ("--set", setting)), *SHORT_LEASE)
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", "checkpoint.enabled=true", *given)
    with runner.up(*options, "--save-every", "10", nodes=("--local", "4", PACED)) as up:
        up.wait_for_step(5)
        following = terminal.start("oobleck events gpt2-demo --follow")
        try:
            _while_it_trains(terminal, Elastic(runner, up), runner, tmp_path / "notice")
            outcome = up.finish()
            told, _ = following.communicate(timeout=60)
        finally:
            following.kill()
    assert_all_is_right(outcome, endless_reference)
    found = [(cause, *nodes) for cause, _, nodes in recoveries(outcome)]
    # On a busy machine its peers may say so before its agent does.
    assert [("worker_exited", *nodes) if cause == "peer_failed" else (cause, *nodes) for cause, *nodes in found] == [
        ("drained", "node1"),
        ("joined", "node4"),
        ("connection_lost", "node2"),
        ("joined", "node2"),
        ("lease_expired", "node4"),
        ("drained", "node3"),
        ("joined", "node7"),
        ("drained", "node2"),
        ("worker_exited", "node0"),
        ("joined", "node0"),
    ]
    assert nodes_of(outcome) == ["node0", "node7"]
    assert_cost_its_lease(outcome.recoveries[4])
    assert "node2" in told
    said: dict[str, str] = {}
    for line in AFTERWARDS:
        if line.startswith("oobleck checkpoint export"):
            shutil.rmtree(tmp_path / "model", ignore_errors=True)  # each is shown as the first
        said[line] = terminal.give(line)
    assert "node2" in said["oobleck events"]
    assert TAG in said["oobleck checkpoint list"]
    assert "<html" in (tmp_path / "report.html").read_text()[:200]
    assert list((tmp_path / "model").glob("*.safetensors"))
    assert list((tmp_path / "imported").iterdir())
    assert sorted(terminal.given) == sorted(ON_A_RUN)
    assert runner.left_over() == []


def _while_it_trains(terminal: Terminal, run: Elastic, runner: Runner, notice: Path) -> None:
    give, up = terminal.give, run.up
    assert TAG in give("oobleck status")
    assert (
        json.loads(give("oobleck status --json")).keys() == json.loads(give("oobleck status gpt2-demo --json")).keys()
    )
    assert "node1" in run.refused("add", "node1")
    for command in ("add", "drain", "kill"):
        assert "'node9'" in run.refused(command, "node9")
    give("oobleck drain node1")
    up.wait_for("node1 has left")
    give("oobleck add node4")
    up.wait_for("node4 taken in; pipelines grow")
    up.wait_for_steps(2)
    _kill_one_and_no_other(terminal, run, runner)
    give("oobleck add node2")
    up.wait_for("node2 taken in; pipelines grow")
    up.wait_for_steps(3)

    frozen = worker_pids(runner)["node4"]
    birth = started_at(frozen)
    freeze(runner, "node4")
    up.wait_for("node4 lost: silent for")
    up.wait_for_loss("node4")
    up.wait_for_steps(3)
    assert started_at(frozen) != birth, "its worker was ended"

    notice.write_text("taken away at noon\n")
    assert "at noon" in up.wait_for("node3 is to be terminated")
    up.wait_for("node3 has left")
    give("oobleck add node7")
    up.wait_for("node7 taken in; ")
    give("oobleck drain node2")
    up.wait_for("node2 has left")
    up.wait_for_steps(3)
    give("oobleck chaos trace.json --tag gpt2-demo --speedup 60")
    up.wait_for("node0 taken in; worker restarted")
    up.wait_for_steps(2)
    give("oobleck stop")
    assert sorted(terminal.given) == sorted(WHILE_IT_TRAINS)


def _kill_one_and_no_other(terminal: Terminal, run: Elastic, runner: Runner) -> None:
    before = worker_pids(runner)
    births = {node: started_at(before[node]) for node in ("node0", "node2", "node3", "node4")}
    assert None not in births.values()
    terminal.give("oobleck kill node2")
    run.up.wait_for_loss("node2")
    run.up.wait_for_steps(3)
    assert started_at(before["node2"]) != births.pop("node2")
    assert worker_pids(runner) == before, "none was started again"
    assert {node: started_at(before[node]) for node in births} == births, "the same processes live on"
    assert "node2 is lost" in run.refused("drain", "node2")

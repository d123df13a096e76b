"""The commands that the pages show for a run, given to one as they stand there, but for its name."""

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

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right
from .harness import TAG, Runner, Up
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
def test_what_the_pages_show_for_a_run_does_what_they_say(
    runner: Runner, terminal: Terminal, tmp_path: Path, endless_reference: Reference
) -> None:
    """And, while it saves, changes no loss."""
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", "checkpoint.enabled=true")
    with runner.up(*options, "--save-every", "10", nodes=("--local", "4", PACED)) as up:
        up.wait_for_step(5)
        following = terminal.start("oobleck events gpt2-demo --follow")
        try:
            _while_it_trains(terminal, up)
            outcome = up.finish()
            told, _ = following.communicate(timeout=60)
        finally:
            following.kill()
    assert_all_is_right(outcome, endless_reference)
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


def _while_it_trains(terminal: Terminal, up: Up) -> None:
    give = terminal.give
    assert TAG in give("oobleck status")
    assert (
        json.loads(give("oobleck status --json")).keys() == json.loads(give("oobleck status gpt2-demo --json")).keys()
    )
    give("oobleck kill node2")
    up.wait_for("node2 lost; ")
    give("oobleck add node2")
    up.wait_for("node2 taken in; ")
    give("oobleck drain node2")
    up.wait_for("node2 has left")
    give("oobleck add node7")
    up.wait_for("node7 taken in; ")
    give("oobleck add node4")
    up.wait_for("node4 taken in; ")
    give("oobleck drain node1")
    up.wait_for("node1 has left")
    give("oobleck chaos trace.json --tag gpt2-demo --speedup 60")
    up.wait_for("node0 taken in; restart_worker")
    give("oobleck stop")
    assert sorted(terminal.given) == sorted(WHILE_IT_TRAINS)

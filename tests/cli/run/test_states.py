"""Which run a script's states belong to, as the command line decides it: nothing is started."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.job.ranks import RanksSpec
from oobleck.runtime.files import RunDirectory
from oobleck.storage import Layout, TensorSpec
from oobleck.storage.scripts import PartNote, identity_of, state_name, write_part

LAYOUT = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(8,))]}, metadata={})


def saved(directory: Path, script: Path, *arguments: str, number: int = 1) -> None:
    """Have a script's states lie in a directory."""
    run = RanksSpec(tag="t", entry="script", command=(script.name, *arguments), directory=str(script.parent))
    whose = identity_of(run)
    note = PartNote(
        name=state_name(7, f"s{number}-a"),
        step=7,
        start=f"s{number}-a",
        rank=0,
        world_size=1,
        number=1,
        saved_at="",
        is_planned=True,
        shardings=(),
        script=whose.script,
        arguments=whose.arguments,
    )
    write_part(directory, note, LAYOUT, memoryview(bytearray(LAYOUT.size_bytes)), is_planned=True)
    if number > 1:
        old = replace(note, name=state_name(9, "s1-a"), step=9, start="s1-a", arguments="of long ago")
        write_part(directory, old, LAYOUT, memoryview(bytearray(LAYOUT.size_bytes)), is_planned=True)


@pytest.fixture(name="projects")
def _projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two directories with a script of one name each; nothing after the check of states can be reached."""
    monkeypatch.setenv("OOBLECK_BASE_DIR", str(tmp_path / "base"))
    scripts = tmp_path / "a" / "train.py", tmp_path / "b" / "train.py"
    for script in scripts:
        script.parent.mkdir()
        script.write_text("raise SystemExit(3)")
    return scripts


def run(script: Path, *words: str) -> int:
    return main(["run", "--directory", str(script.parent), *words])


def test_a_named_run_with_the_states_of_another_script_is_refused_before_anything_starts(
    projects: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "base/train/checkpoints", projects[0])
    assert run(projects[1], "--tag", "train", "train.py") == 2
    said = capsys.readouterr().err
    assert f"were saved by {projects[0]}, and this is {projects[1]}; name another --tag" in said
    assert not (tmp_path / "base/train/lock").exists()
    elsewhere = tmp_path / "shared"
    saved(elsewhere, projects[0])
    assert run(projects[1], "--tag", "x", "--env", f"OOBLECK_CHECKPOINT_DIR={elsewhere}", "train.py") == 2
    assert "were saved by" in capsys.readouterr().err


def test_other_arguments_than_those_of_the_newest_state_are_refused_before_anything_starts(
    projects: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "base/train/checkpoints", projects[0], "--lr", "1", number=2)
    assert run(projects[0], "train.py", "--lr", "2") == 2
    assert "with other arguments of the script; --tag train continues from it" in capsys.readouterr().err
    assert not (tmp_path / "base/train/lock").exists()


def test_input_that_ranks_do_not_get_is_named(
    projects: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("data").write_text("1e-3\n")
    reading, writing = os.pipe()
    os.write(writing, b"1e-3\n")
    with open(tmp_path / "data") as file, os.fdopen(reading) as pipe, open(os.devnull) as nothing:
        for stdin, is_named in ((file, True), (pipe, True), (nothing, False)):
            monkeypatch.setattr("sys.stdin", stdin)
            run(projects[0], "--ssh-config", "none", "train.py")  # which virtual nodes do not take
            assert ("the ranks do not get this command's input" in capsys.readouterr().err) == is_named
    os.close(writing)


def test_the_second_script_of_a_name_gets_a_tag_of_its_own_and_says_so(
    projects: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = RunDirectory(base_dir=tmp_path / "base", tag="train")
    first.create()
    first.note_owner(str(projects[0]))
    saved(first.path / "checkpoints", projects[0])
    assert run(projects[1], "--ssh-config", "none", "train.py") == 2, "which virtual nodes do not take"
    assert "another script's run is called train; this one is train-" in capsys.readouterr().err


def test_the_second_job_file_of_a_tag_gets_a_tag_of_its_own_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.yaml").write_text("max_steps: 3\n")
    base = tmp_path / "base"
    first = RunDirectory(base_dir=base, tag="gpt2-demo")
    first.create()
    first.note_owner(str(tmp_path / "a/job.yaml"))
    for name, is_first in (("a", True), ("b", False)):
        words = ["up", "--local", "2", "--job", str(tmp_path / name / "job.yaml"), "--kill", "none"]
        assert main([*words, "--base-dir", str(base)]) == 2
        said = capsys.readouterr().err
        assert ("another job's run is called gpt2-demo; this one is gpt2-demo-" not in said) == is_first
        assert main([*words, "--tag", "gpt2-demo", "--base-dir", str(base)]) == 2
        assert "another job's run" not in capsys.readouterr().err

"""`oobleck checkpoint`, on checkpoints of a small state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.control.journal import JobStarted
from oobleck.errors import ExitCode
from oobleck.job import CheckpointSpec, JobSpec
from oobleck.runtime.journals import JournalWriter
from oobleck.storage import CheckpointDirectory, Layout, Manifest, Shard, TensorSpec
from oobleck.storage.layer_file import write_layer_file


@pytest.fixture(name="base_dir")
def _base_dir(tmp_path: Path) -> Path:
    """Two complete checkpoints of a run, and one that was never finished."""
    for step in (10, 20):
        write(tmp_path / "demo" / "checkpoints", step)
    (tmp_path / "demo" / "checkpoints" / "step-00000030.0123abcd.1").mkdir()
    return tmp_path


def write(path: Path, step: int) -> None:
    name = f"step-{step:08d}.0123abcd.1"
    (path / name).mkdir(parents=True)
    layout = Layout.of({0: [TensorSpec(name="w", dtype="F32", shape=(4,))]}, metadata={})
    data = memoryview(bytearray(layout.size_bytes))
    size, digest = write_layer_file(path / name / "layer-0000.safetensors", layout.entries, data, metadata={})
    CheckpointDirectory(path).commit(
        Manifest(
            version=1,
            name=name,
            tag="demo",
            run="0123abcd",
            saved_at=f"2026-01-01T00:00:{step}+00:00",
            step=step,
            generation=1,
            loss=2.5,
            seed=0,
            global_batch_size=8,
            samples_seen=8 * step,
            data_digest="",
            layer_names=("embedding",),
            shards=(Shard(layer=0, file="layer-0000.safetensors", size_bytes=size, sha256=digest),),
        )
    )


def run(capsys: pytest.CaptureFixture[str], base_dir: Path, *arguments: str) -> tuple[int, str]:
    code = main(["checkpoint", *arguments, "--base-dir", str(base_dir)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("where", [[], ["demo"]])
def test_list_shows_the_newest_first(capsys, base_dir: Path, where: list[str]) -> None:
    code, output = run(capsys, base_dir, "list", *where)
    assert code == ExitCode.DONE
    assert [line.split()[1] for line in output.splitlines()] == [
        "20",
        "10",
        str(base_dir / "demo/checkpoints/step-00000030.0123abcd.1"),
    ]
    assert output.splitlines()[2].split()[0] == "unfinished"


def test_list_tells_programs_what_is_complete(capsys, base_dir: Path) -> None:
    (base_dir / "demo/checkpoints/step-00000010.0123abcd.1/layer-0000.safetensors").unlink()
    _, output = run(capsys, base_dir, "list", "demo", "--json")
    assert [(entry.get("step"), entry["complete"]) for entry in json.loads(output)] == [
        (20, True),
        (10, False),
        (None, False),
    ]


def test_inspect_takes_the_newest_of_a_run(capsys, base_dir: Path) -> None:
    code, output = run(capsys, base_dir, "inspect", "demo")
    assert code == ExitCode.DONE
    assert "step 20, loss 2.5" in output
    assert "embedding" in output
    _, output = run(capsys, base_dir, "inspect", str(base_dir / "demo/checkpoints/step-00000010.0123abcd.1"), "--json")
    assert json.loads(output)["step"] == 10


def test_verify_names_what_is_wrong_and_says_so_to_the_shell(capsys, base_dir: Path) -> None:
    assert run(capsys, base_dir, "verify", "demo")[0] == ExitCode.DONE
    path = base_dir / "demo/checkpoints/step-00000020.0123abcd.1/layer-0000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    code, output = run(capsys, base_dir, "verify", "demo")
    assert code == ExitCode.FAILED
    assert f"{path}: changed" in output
    _, output = run(capsys, base_dir, "verify", "demo", "--json")
    assert json.loads(output)["faults"][0]["file"] == str(path)


def test_a_quoted_tilde_names_a_single_checkpoint_too(capsys, base_dir: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(base_dir / "demo"))
    code, output = run(capsys, base_dir, "verify", "~/checkpoints/step-00000010.0123abcd.1")
    assert (code, "step-00000010.0123abcd.1: whole" in output) == (ExitCode.DONE, True)


def test_wrong_places_are_named(capsys, base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, output = run(capsys, base_dir, "list", "nobody")
    assert (code, "nobody" in output) == (ExitCode.USAGE, True)
    code, output = run(capsys, base_dir, "verify", str(tmp_path / "empty"))
    assert (code, str(tmp_path / "empty") in output) == (ExitCode.CONFIG, True)
    code, output = run(capsys, base_dir, "export", "demo", str(base_dir))
    assert (code, str(base_dir) in output) == (ExitCode.USAGE, True)
    code, output = run(capsys, base_dir, "export", "demo", "x", "--format", "gguf")
    assert (code, "--format" in output) == (ExitCode.USAGE, True)


@pytest.mark.slow
def test_export_says_why_it_cannot(capsys, base_dir: Path, tmp_path: Path) -> None:
    """The process that loads torch tells: this is no model of transformers."""
    code, output = run(capsys, base_dir, "export", "demo", str(tmp_path / "out"))
    assert code == ExitCode.CONFIG
    assert "transformers" in output


def test_list_of_all_runs_is_newest_first_across_runs(capsys, base_dir: Path) -> None:
    write(base_dir / "other" / "checkpoints", 15)
    _, output = run(capsys, base_dir, "list")
    assert [line.split()[1] for line in output.splitlines()[:3]] == ["20", "15", "10"]


def noted(base_dir: Path, tag: str, directory: Path) -> None:
    """Have a run's journal say where its checkpoints lie."""
    job = JobSpec(tag=tag, checkpoint=CheckpointSpec(directory=str(directory)))
    (base_dir / tag).mkdir(exist_ok=True)
    with JournalWriter(base_dir / tag / "journal.jsonl") as journal:
        journal.append(JobStarted(t_s=0.0, version="1", job=job, nodes=(), started_at="2026-01-01T00:00:00+00:00"))


@pytest.mark.parametrize("command", [("inspect", "far"), ("verify", "far"), ("list", "far"), ("list",)])
def test_the_checkpoints_of_a_run_are_where_its_job_has_put_them(capsys, base_dir: Path, command) -> None:
    write(base_dir / "shared disk", 40)
    noted(base_dir, "far", base_dir / "shared disk")
    code, output = run(capsys, base_dir, *command)
    assert code == ExitCode.DONE
    assert str(base_dir / "shared disk/step-00000040.0123abcd.1") in output


def test_a_run_whose_checkpoints_are_on_other_machines_says_where(capsys, base_dir: Path) -> None:
    noted(base_dir, "far", base_dir / "elsewhere")
    code, output = run(capsys, base_dir, "export", "far", str(base_dir / "out"))
    assert code == ExitCode.USAGE
    assert f"its job has them in {base_dir}/elsewhere, which is not on this machine" in output


def test_a_directory_of_a_runs_name_does_not_hide_the_run(capsys, base_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """Where both have checkpoints, neither is taken."""
    here = tmp_path / "here"
    (here / "demo").mkdir(parents=True)
    monkeypatch.chdir(here)
    code, output = run(capsys, base_dir, "inspect", "demo")
    assert (code, "step 20" in output) == (ExitCode.DONE, True)
    write(here / "demo", 50)
    code, output = run(capsys, base_dir, "inspect", "demo")
    assert code == ExitCode.USAGE
    assert f"whole path: {base_dir}/demo/checkpoints or {here}/demo" in output
    assert run(capsys, base_dir, "inspect", f"{here}/demo")[0] == ExitCode.DONE

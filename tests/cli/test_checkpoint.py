"""`oobleck checkpoint`, on checkpoints of a small state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oobleck.checkpoint import CheckpointDirectory, Layout, Manifest, Shard, TensorSpec, write_layer_file
from oobleck.cli.main import main
from oobleck.exit_codes import ExitCode


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


def test_export_says_why_it_cannot(capsys, base_dir: Path, tmp_path: Path) -> None:
    """The process that loads torch tells: this is no model of transformers."""
    code, output = run(capsys, base_dir, "export", "demo", str(tmp_path / "out"))
    assert code == ExitCode.CONFIG
    assert "transformers" in output

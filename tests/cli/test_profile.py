"""`oobleck profile`: what it measures is what runs look for, and is measured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.errors import ExitCode
from oobleck.planner import profile_from_json

JOB = """\
tag: measured
model: {type: gpt2, n_embd: 32, n_layer: 2, n_head: 2}
data: {sequence_length: 16, vocab_size: 300, max_bytes: 100000}
microbatch_size: 2
torch_threads: 1
"""


@pytest.mark.slow
def test_a_profile_is_measured_once_for_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job, output = tmp_path / "job.yaml", tmp_path / "out.json"
    job.write_text(JOB)
    base = ("--base-dir", str(tmp_path / "base"))
    assert main(["profile", str(job), "--device", "cpu", "--json", *base]) == ExitCode.DONE
    answer = capsys.readouterr().out
    profile = profile_from_json(answer, source="the answer")
    assert [layer.name for layer in profile.layers] == ["embedding", "transformer.h.0", "transformer.h.1", "head"]
    assert (profile.microbatch_size, profile.sequence_length) == (2, 16)
    (kept,) = (tmp_path / "base" / "measured" / "profile").glob("*.json")
    assert json.loads(kept.read_text()) == json.loads(answer)

    assert main(["profile", str(job), "--output", str(output), *base]) == ExitCode.DONE
    assert f"measured before: {kept}" in capsys.readouterr().out.replace("\n", "")
    assert output.read_text() == kept.read_text() == answer, "to the last digit: not measured again"


def test_mistakes_are_refused(tmp_path: Path):
    base = ("--base-dir", str(tmp_path))
    assert main(["profile", "--device", "tpu", *base]) == ExitCode.USAGE
    assert main(["profile", "job.yaml", "what", *base]) == ExitCode.USAGE


@pytest.mark.slow  # test_dry_run.py has it of a run
def test_a_model_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    little = ("--set", "data.max_bytes=100000", "--base-dir", str(tmp_path))
    assert main(["profile", "--set", "model=gpt3", *little]) == ExitCode.CONFIG
    assert "'gpt3'" in capsys.readouterr().err

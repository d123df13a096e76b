"""`oobleck verify` on scripts of many kinds: each trains on nodes as it does by itself, or is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oobleck.errors import ExitCode

from .harness import processes_with

SCRIPT, JOB = (Path(__file__).with_name(name) for name in ("verified_script.py", "verified_job.py"))
TIMEOUT_S = 420


@dataclass(frozen=True)
class Verified:
    exit_code: int
    answer: dict[str, Any]
    errors: str

    @property
    def first(self) -> str:
        """What differs first."""
        return str(self.answer["differences"][0]["what"])


class Verifier:
    """Runs the command from a directory in which nothing may be left."""

    def __init__(self, directory: Path, temporary: Path) -> None:
        self.directory = directory
        self.temporary = temporary

    def verify(self, script: Path, *words: str) -> Verified:
        command = [sys.executable, "-m", "oobleck", "verify", str(script), "--steps=4", "--local=3", "--json", *words]
        done = self.run(command)
        assert done.stdout, done.stderr
        return Verified(done.returncode, json.loads(done.stdout), done.stderr)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def kind(self, kind: str, *options: str) -> Verified:
        """Verify the script of a kind."""
        return self.verify(SCRIPT, *options, "--", kind, "output")

    def left_over(self) -> list[str]:
        """Files and processes that were left, after some time for ends that are under way."""
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s and (self._files() or processes_with(f"TMPDIR={self.temporary}")):
            time.sleep(0.1)
        return [*self._files(), *(str(each.pid) for each in processes_with(f"TMPDIR={self.temporary}"))]

    def _files(self) -> list[str]:
        found = [*self.directory.iterdir(), *self.temporary.iterdir()]
        return sorted(str(path) for path in found if not path.name.startswith("torchinductor_"))


@pytest.fixture
def verifier(tmp_path: Path) -> Iterator[Verifier]:
    temporary = Path(tempfile.mkdtemp(prefix="ob"))
    directory = tmp_path / "here"
    directory.mkdir()
    verifier = Verifier(directory, temporary)
    yield verifier
    left = verifier.left_over()
    shutil.rmtree(temporary)
    assert not left


def assert_equal(verified: Verified) -> None:
    assert verified.answer["verdict"] == "equal", (verified.answer["differences"][:3], verified.answer["problem"])
    assert verified.exit_code == ExitCode.DONE
    assert [pair["on_nodes"]["step"] for pair in verified.answer["steps"]] == [1, 2, 3, 4]
    assert {each["step"] for each in verified.answer["tensors"]} == {1, 4}
    assert not [each for each in verified.answer["tensors"] if each["problem"]]


@pytest.mark.slow  # test_trainer.py has one of transformers' Trainer without the command
@pytest.mark.parametrize(
    "kind",
    ["sampler", "head", "lora", "loss", "packed", "labels", "mean", "untied", "hooked", "buffered", "weighted"],
)
def test_a_script_trains_on_nodes_as_it_does_by_itself(verifier: Verifier, kind: str) -> None:
    assert_equal(verifier.kind(kind))


@pytest.mark.slow
def test_the_same_is_so_in_double_precision(verifier: Verifier) -> None:
    verified = verifier.kind("lora", "--dtype", "float64")
    assert_equal(verified)
    assert verified.answer["dtype"] == "float64"


@pytest.mark.slow  # tests/control/verification and tests/cli/verify have what is compared and said
def test_a_job_trains_on_nodes_as_its_uncut_model_does_in_a_plain_loop(verifier: Verifier) -> None:
    verified = verifier.verify(JOB)
    assert_equal(verified)
    assert verified.answer["without_dropout"] == {"drop": 0.1}


@pytest.mark.slow  # tests/transformers/test_checks.py has what is refused, tests/cli/verify what is said of it
def test_what_oobleck_does_not_call_is_refused_by_name(verifier: Verifier, tmp_path: Path) -> None:
    verified = verifier.verify(SCRIPT, "--", "override", str(tmp_path / "output"))
    assert verified.exit_code == ExitCode.CONFIG
    assert verified.answer["verdict"] == "refused"
    assert "Trainer.get_batch_samples is overridden by OwnSamples" in verified.answer["problem"]
    assert "Trainer.get_batch_samples is overridden by OwnSamples" in verified.errors


@pytest.mark.slow
def test_a_run_that_clips_what_the_script_does_not_is_different_after_its_first_step(verifier: Verifier) -> None:
    verified = verifier.kind("sampler", "--set", "optimizer.max_grad_norm=1e-9")
    assert verified.exit_code == ExitCode.DIFFERENT
    first = verified.answer["differences"][0]
    assert first["step"] == 1
    assert first["what"] in {each["name"] for each in verified.answer["tensors"]}


@pytest.mark.slow
def test_a_run_starts_only_if_it_is_verified_first(verifier: Verifier, tmp_path: Path) -> None:
    words = (
        "--local",
        "3",
        "--verify",
        "2",
        "--set",
        "optimizer.max_grad_norm=1e-9",
        "--base-dir",
        str(tmp_path / "base"),
    )
    command = [sys.executable, "-m", "oobleck", "up", str(SCRIPT), *words, "--", "sampler", "output"]
    done = verifier.run(command)
    assert done.returncode == ExitCode.DIFFERENT
    assert "DIFFERENT, and first: parameter" in done.stderr
    assert "not started" in done.stderr
    assert not (tmp_path / "base").exists()


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_told_from_one_that_differs(verifier: Verifier, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    own_log = "class OwnSampler(Trainer):\n    def log(self, *args):\n        raise KeyError('mine')\n"
    script.write_text(SCRIPT.read_text().replace("class OwnSampler(Trainer):\n", own_log))
    verified = verifier.verify(script, "--", "sampler", "output")
    assert verified.exit_code == ExitCode.FAILED
    assert verified.answer["verdict"] == "failed"
    assert "KeyError: 'mine'" in verified.answer["problem"]
    (verifier.directory / "output").rmdir()  # a Trainer makes it when it is made; nothing is in it

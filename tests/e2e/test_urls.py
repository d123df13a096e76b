"""A run whose checkpoints are in an S3 store: everything is killed, and it goes on from there with the same losses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
import safetensors.torch

from oobleck.errors import ExitCode
from tests.s3_server import Store, serve_s3

from .elastic import ENDLESS, PACED, TOLERANCE, Reference, stopped
from .harness import Runner, kill_everything, oobleck
from .test_checkpoints import first_step_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

URL = "s3://bucket/of/runs"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with serve_s3("bucket") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


def test_a_run_that_loses_a_node_and_then_all_goes_on_from_a_store_that_has_failed_it(
    runner: Runner, endless_reference: Reference, store: Store, tmp_path: Path
) -> None:
    runner.kill_fork_server()  # a warm one has the variables of before
    saves = f"checkpoint={{enabled: true, save_steps: 4, directory: {URL}}}"
    words = ("--job", str(runner.job_file()), "--set", saves, "--steps", str(ENDLESS))
    nodes = ("--local", "4", PACED)
    with runner.up(*words, nodes=nodes) as up:
        up.wait_for_step(2)
        store.refuses, store.cuts = {"SlowDown": 2, "ExpiredToken": 2}, 2
        assert oobleck("kill", "node2", "--base-dir", str(runner.base_dir)).returncode == 0
        up.wait_for_loss("node2")
        up.wait_for_checkpoint(8)
        kill_everything(runner, up)
    assert {"SlowDown", "ExpiredToken", "cut"} == set(store.answered)
    records = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    losses = [record["loss"] for record in records]
    shutil.rmtree(runner.memory)
    with runner.up(*words, nodes=nodes) as up:
        up.wait_for_steps(4)
        outcome = stopped(runner, up)
    assert outcome.exit_code == ExitCode.DONE, outcome.output
    first = first_step_of(runner)
    assert 8 < first <= len(records) + 1
    losses[first - 1 :] = outcome.losses
    assert losses == pytest.approx(endless_reference(len(losses)), abs=TOLERANCE)
    listed = oobleck("checkpoint", "list", URL)
    assert f"step {len(losses):>7}" in listed.stdout, listed
    done = oobleck("checkpoint", "export", URL, "s3://bucket/model", "--base-dir", str(runner.base_dir))
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "model.safetensors"
    s3fs.S3FileSystem(skip_instance_cache=True).get("bucket/model/model.safetensors", str(copy))
    assert "transformer.wte.weight" in safetensors.torch.load_file(copy)

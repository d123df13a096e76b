"""Data in shards, on real processes that are killed: each record is in one committed step an epoch, and is trained on.

Which records those are, the journal says. That workers really took them is told by the losses: an independent program
that reads the same rows, in the order of the journal, has the same ones.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oobleck.cli.inputs.job_file import load_job
from oobleck.job import JobSpec
from oobleck.training.data.redis_shard import position_of
from tests.kafka_broker import needs_kafka, serve_kafka
from tests.redis_server import needs_redis, serve_redis

from .elastic import PACED, TOLERANCE
from .harness import Runner, kill_everything, oobleck
from .reference import losses_of_rows

LENGTH = 32
TOKENS = 300
SIZES = (60, 5, 190, 110, 1, 146)

JOB = """\
tag: e2e
model: {type: gpt2, n_embd: 32, n_layer: 4, n_head: 2}
data: {shards: [SHARDS], sequence_length: 32, vocab_size: 300, MORE}
max_steps: 1000
global_batch_size: 16
microbatch_size: 2
num_pipelines: 2
dtype: float64
torch_threads: 1
control: {orphan_timeout_s: 30, rejoin_after_s: 0}
optimizer: {learning_rate: 0.003, warmup_steps: 4}
checkpoint: {save_steps: 5, directory: CHECKPOINTS}
"""


@dataclass(frozen=True)
class Shards:
    """Files of rows, and a job that reads them."""

    directory: Path
    job_path: Path

    @property
    def job(self) -> JobSpec:
        return load_job(self.job_path.read_text(), source=str(self.job_path))

    def rows(self, name: str, bounds: Sequence[int]) -> np.ndarray:
        return np.fromfile(name, dtype="<u2").reshape(-1, LENGTH)[bounds[0] : bounds[-1]]

    def every_record(self) -> list[tuple[str, int]]:
        sizes = {path: path.stat().st_size // (2 * LENGTH) for path in sorted(self.directory.glob("*.bin"))}
        return [(str(path), row) for path, size in sizes.items() for row in range(size)]


@pytest.fixture(name="shards")
def _shards(tmp_path: Path) -> Shards:
    directory = tmp_path / "shards"
    directory.mkdir()
    for number, size in enumerate(SIZES):
        write_rows(directory / f"part{number}.bin", size, seed=number)
    return job_of(tmp_path, "epochs: 2, shards_at_once: 2")


@pytest.fixture(autouse=True)
def _memory(runner: Runner) -> Iterator[None]:
    """Leaves no memory behind: runs whose end was a kill keep theirs."""
    yield
    shutil.rmtree(runner.memory, ignore_errors=True)


def job_of(tmp_path: Path, more: str) -> Shards:
    directory = tmp_path / "shards"
    text = JOB.replace("SHARDS", f'"{directory}/*.bin"').replace("CHECKPOINTS", str(tmp_path / "checkpoints"))
    (tmp_path / "job.yaml").write_text(text.replace("MORE", more))
    return Shards(directory, tmp_path / "job.yaml")


def write_rows(path: Path, count: int, *, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, TOKENS, size=(count, LENGTH))
    with path.open("ab") as file:
        file.write(rows.astype("<u2").tobytes())


def committed(journal: Sequence[dict[str, Any]], *, up_to: float = float("inf")) -> dict[int, dict[str, Any]]:
    """What each committed step took, by the journal: the newest that was told of it before its commit."""
    told: dict[int, dict[str, Any]] = {}
    done: dict[int, dict[str, Any]] = {}
    names: list[str] = []
    for entry in journal:
        match entry["@type"]:
            case "ShardsKnown":
                names = entry["names"]
            case "RecordsDealt":
                told[entry["records"]["step"]] = entry["records"]
            case "StepDone" if entry["record"]["step"] <= up_to:
                step = entry["record"]["step"]
                runs = [(names[run["shard"]], run["bounds"]) for run in told[step]["runs"]]
                done[step] = {"runs": runs, "loss": entry["record"]["loss"]}
    return done


def counts(steps: dict[int, dict[str, Any]]) -> Counter[tuple[str, int]]:
    return Counter((name, row) for step in steps.values() for name, bounds in step["runs"] for row in bounds[:-1])


def assert_trained_on(shards: Shards, steps: dict[int, dict[str, Any]]) -> None:
    """The losses are those of the rows that the journal names."""
    assert sorted(steps) == list(range(1, len(steps) + 1))
    rows = [
        np.concatenate([shards.rows(name, bounds) for name, bounds in step["runs"]])
        for _, step in sorted(steps.items())
    ]
    batches = [torch.from_numpy(each.astype(np.int64)) for each in rows]
    losses = losses_of_rows(shards.job, batches)
    gaps = [abs(step["loss"] - loss) for (_, step), loss in zip(sorted(steps.items()), losses, strict=True)]
    assert max(gaps) < TOLERANCE, gaps


def assert_nothing_runs(runner: Runner) -> None:
    """Memory may be kept by a node that was ended while it still wrote the last checkpoint."""
    assert [left for left in runner.left_over() if not left.startswith("/dev/shm")] == []


def step_when_dry(runner: Runner) -> int:
    """Wait until the run waits for data; returns its newest step."""
    deadline_s = time.monotonic() + 30.0
    while True:
        said = oobleck("status", "--json", "--base-dir", str(runner.base_dir)).stdout
        status = json.loads(said) if said else {}
        if "waiting for more data" in (status.get("data") or ""):
            return int(status["step"])
        assert time.monotonic() < deadline_s, said
        time.sleep(0.1)


@pytest.mark.slow
def test_each_record_is_trained_on_once_an_epoch_whatever_is_killed(runner: Runner, shards: Shards) -> None:
    options = ("--job", str(shards.job_path))
    where = ("--local", "4", PACED)  # an epoch must not end before everything has happened
    with runner.up(*options, "--resume", "never", nodes=where) as first:
        first.wait_for_step(4)
        killed = oobleck("kill", "node1", "--base-dir", str(runner.base_dir))
        assert killed.returncode == 0, killed.stderr
        first.wait_for_loss("node1")
        first.wait_for_steps(2)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with runner.up(*options, nodes=where) as second:
            second.wait_for("a new master takes over")
            second.wait_for_checkpoint(10)  # a node may have been lost while step 5 was saved
            kill_everything(runner, second)
    before = runner.journal()
    outcome = runner.run(*options, nodes=where)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.summary["begun_after"] + outcome.summary["steps_committed"] == 64
    after = committed(runner.journal())
    went_back_to = min(after) - 1
    assert went_back_to >= 5, f"it went on from a checkpoint: {outcome.output}"
    steps = {**committed(before, up_to=went_back_to), **after}
    assert counts(steps) == Counter(shards.every_record() * 2)
    assert_trained_on(shards, steps)
    assert_nothing_runs(runner)


@pytest.mark.slow
def test_a_file_is_followed_until_it_is_complete(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shards = job_of(tmp_path, "follow: true")
    grown = shards.directory / "growing.bin"
    write_rows(grown, 40, seed=1)
    with runner.up("--job", str(shards.job_path), "--resume", "never") as up:
        up.wait_for_step(1)
        assert step_when_dry(runner) == 2, "eight records are no step"
        added = oobleck("drain", "node3", "--base-dir", str(runner.base_dir))
        assert added.returncode == 0, added.stderr
        up.wait_for("node3 has left")  # plans change while there is nothing to do
        write_rows(grown, 41, seed=2)
        up.wait_for_step(3)
        assert step_when_dry(runner) == 5
        grown.with_name("growing.bin.end").touch()
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    assert outcome.summary["steps_committed"] == 6
    steps = committed(runner.journal())
    assert counts(steps) == Counter(shards.every_record())
    assert_trained_on(shards, steps)
    again = runner.run("--job", str(shards.job_path))
    assert again.exit_code == 0, again.output
    assert committed(runner.journal()) == steps, "nothing is trained twice"
    assert_nothing_runs(runner)


@pytest.mark.slow
def test_a_shard_that_cannot_be_read_is_named_and_gone_on_with_once_it_can(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shards = job_of(tmp_path, "epochs: 1")
    for number in range(3):
        write_rows(shards.directory / f"part{number}.bin", 50, seed=number)
    broken = shards.directory / "part1.bin"
    whole = broken.read_bytes()
    harmed = np.frombuffer(whole, dtype="<u2").reshape(-1, LENGTH).copy()
    harmed[30, 7] = TOKENS + 9
    broken.write_bytes(harmed.tobytes())
    outcome = runner.run("--job", str(shards.job_path), "--resume", "never")
    assert outcome.exit_code == 75, outcome.output
    assert {entry["shard"] for entry in runner.journal() if entry["@type"] == "ShardQuarantined"} == {str(broken)}
    assert str(broken) in outcome.summary["reason"]
    before = committed(runner.journal())
    taken = counts(before)
    assert max(taken.values()) == 1
    assert {name for name, _ in set(shards.every_record()) - taken.keys()} == {str(broken)}
    broken.write_bytes(whole)
    outcome = runner.run("--job", str(shards.job_path))
    assert outcome.exit_code == 0, outcome.output
    steps = {**before, **committed(runner.journal())}
    assert counts(steps) == Counter(shards.every_record())
    assert_trained_on(shards, steps)
    assert_nothing_runs(runner)


@needs_redis
@pytest.mark.slow
def test_a_redis_stream_is_trained_on_once_though_a_node_is_killed(runner: Runner, tmp_path: Path) -> None:
    import redis

    with serve_redis(tmp_path) as port, redis.Redis(port=port) as stream:
        text = JOB.replace("[SHARDS]", f'["redis://127.0.0.1:{port}/rows"]').replace("MORE", "follow: true")
        (tmp_path / "job.yaml").write_text(text.replace("CHECKPOINTS", str(tmp_path / "checkpoints")))
        write_rows(tmp_path / "all.bin", 300, seed=5)
        rows = np.fromfile(tmp_path / "all.bin", dtype="<u2").reshape(-1, LENGTH)
        ids = [stream.xadd("rows", {"tokens": row.tobytes()}) for row in rows[:130]]
        with runner.up("--job", str(tmp_path / "job.yaml"), "--resume", "never") as up:
            up.wait_for_step(1)  # lines about steps are thinned, and there are few before more data comes
            assert oobleck("kill", "node2", "--base-dir", str(runner.base_dir)).returncode == 0
            up.wait_for_loss("node2")
            ids += [stream.xadd("rows", {"tokens": row.tobytes()}) for row in rows[130:]]
            stream.set("rows:end", 1)
            outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    steps = committed(runner.journal())
    taken = [stop - 1 for _, step in sorted(steps.items()) for _, bounds in step["runs"] for stop in bounds[1:]]
    assert taken == [position_of(each) for each in ids]
    assert [step["loss"] for _, step in sorted(steps.items())] == pytest.approx(
        losses_of_rows(load_job(text, source="job"), torch.from_numpy(rows.astype(np.int64)).split(16)),
        abs=TOLERANCE,
    )
    assert_nothing_runs(runner)


@needs_kafka
@pytest.mark.slow
def test_a_kafka_topic_is_trained_on_once_though_a_node_is_killed(runner: Runner, tmp_path: Path) -> None:
    write_rows(tmp_path / "all.bin", 300, seed=5)
    rows = np.fromfile(tmp_path / "all.bin", dtype="<u2").reshape(-1, LENGTH)
    parts = [[row.tobytes() for row in rows[part::4]] for part in range(4)]
    with serve_kafka() as broker:
        name = f'"kafka://{broker.address}/rows?partitions=4&format=tokens"'
        text = JOB.replace("SHARDS", name).replace("MORE", "follow: true")
        (tmp_path / "job.yaml").write_text(text.replace("CHECKPOINTS", str(tmp_path / "checkpoints")))
        for number, part in enumerate(parts):
            broker.produce("rows", number, part[:40])
        with runner.up("--job", str(tmp_path / "job.yaml"), "--resume", "never") as up:
            up.wait_for_step(1)  # lines about steps are thinned, and there are few before more data comes
            assert oobleck("kill", "node2", "--base-dir", str(runner.base_dir)).returncode == 0
            up.wait_for_loss("node2")
            for number, part in enumerate(parts):
                broker.produce("rows", number, part[40:])
                broker.produce("rows", number, [b""], headers=["end"])
            outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    steps = [step for _, step in sorted(committed(runner.journal()).items())]
    taken = [
        [(int(shard.rpartition("#")[2]), stop - 1) for shard, bounds in step["runs"] for stop in bounds[1:]]
        for step in steps
    ]
    assert sorted(itertools.chain(*taken)) == [(part, offset) for part in range(4) for offset in range(75)]
    used = [
        torch.from_numpy(np.stack([rows[part + 4 * offset] for part, offset in step]).astype(np.int64))
        for step in taken
    ]
    assert [step["loss"] for step in steps] == pytest.approx(
        losses_of_rows(load_job(text, source="job"), used), abs=TOLERANCE
    )
    assert_nothing_runs(runner)

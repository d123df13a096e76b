"""Metrics from a journal, and their text for Prometheus."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from oobleck.control.journal import JobStarted, NodeAdded, PlanAdopted, ProfileKnown
from oobleck.control.journal.metrics import Metrics, MetricSample, metric_rows, prometheus_text
from oobleck.job import NodeSpec
from oobleck.planner import (
    DeviceProfile,
    LayerProfile,
    NetworkProfile,
    Profile,
    device_sheet,
    profile_to_json,
)
from oobleck.wire import decode_json, encode_json
from tests.control.journals import adopted, committed, job_started, plan, run_with_a_loss


def sample_of(entries, now_s: float | None = None) -> MetricSample:
    metrics = Metrics()
    last_s = 0.0
    for entry in entries:
        metrics.apply(entry)
        last_s = max(last_s, entry.t_s)
    return metrics.sample(last_s if now_s is None else now_s)


def profile(device: str) -> ProfileKnown:
    layer = LayerProfile(
        name="l", forward_s={1: 1.0}, backward_s={1: 1.0}, param_bytes=4 * 10**9, optimizer_bytes=1,
        activation_bytes=1, output_bytes=1,
    )  # fmt: skip
    network = NetworkProfile(
        inter_node_bytes_per_s=1e9, inter_node_latency_s=0.0, intra_node_bytes_per_s=1e9, intra_node_latency_s=0.0
    )
    known = Profile(
        model="m", microbatch_size=1, sequence_length=8, layers=(layer,) * 3,
        device=DeviceProfile(name=device, memory_bytes=10**12), network=network,
    )  # fmt: skip
    return ProfileKnown(t_s=0.5, profile_json=profile_to_json(known))


def test_a_finished_run_is_counted_whole():
    sample = sample_of(run_with_a_loss())
    assert (sample.step, sample.generation, sample.recoveries, sample.nodes) == (120, 2, 1, 2)
    assert sample.tokens == 120 * 2048
    assert sample.tokens_per_s == 2048 / 0.5


@given(st.integers(1, 150))
def test_the_parts_of_the_time_sum_to_the_elapsed_time(length):
    entries = list(run_with_a_loss())[:length]
    sample = sample_of(entries)
    assert sample.useful_s + sum(sample.downtime_s.values()) == pytest.approx(entries[-1].t_s)


def test_before_the_first_step_nothing_is_invented():
    sample = sample_of([job_started(("a",))], now_s=2.0)
    assert (sample.loss, sample.tokens_per_s, sample.mfu, sample.goodput) == (None, None, None, 0.0)
    assert "oobleck_loss" not in prometheus_text(sample, "job")


def test_utilisation_is_measured_against_the_data_sheet_of_the_device():
    entries = [
        job_started(("a", "b"), dtype="bfloat16"),
        profile("NVIDIA A100-SXM4-80GB"),
        adopted(1.0, 1, plan(("a",), ("b",))),
        committed(2.0, 1, duration_s=1.0, tokens=10_000),
    ]
    # Two layers of 10^9 parameters after the embedding, on two devices of 312 Tflop/s.
    assert sample_of(entries).mfu == pytest.approx(6 * 2e9 * 10_000 / (2 * 312e12))


def test_utilisation_of_several_kinds_is_measured_against_all_of_their_sheets():
    slow = NodeSpec(name="c", host="c", device="A40")
    entries = [
        job_started(("a", "b"), dtype="bfloat16"),
        NodeAdded(t_s=0.2, node=slow),
        profile("NVIDIA A100-SXM4-80GB"),
        replace(profile("NVIDIA A40"), kind="A40"),
        adopted(1.0, 1, plan(("a",), ("b",), ("c",))),
        committed(2.0, 1, duration_s=1.0, tokens=10_000),
    ]
    expected = pytest.approx(6 * 2e9 * 10_000 / (2 * 312e12 + device_sheet("A40").bfloat16_flops))
    assert sample_of(entries).mfu == expected
    books = Metrics()
    for entry in entries[:-1]:
        books.apply(entry)
    continued = decode_json(Metrics, encode_json(books))
    for entry in entries:
        if isinstance(entry, JobStarted | ProfileKnown | PlanAdopted):
            continued.learn(entry)
    continued.apply(entries[-1])
    assert continued.sample(2.0).mfu == expected
    assert sample_of([entry for entry in entries if entry != entries[3]]).mfu is None, "one kind is not known"


@pytest.mark.parametrize("device", ["cpu", "Some GPU"])
def test_utilisation_of_an_unknown_device_is_not_guessed(device):
    entries = [job_started(("a",)), profile(device), adopted(1.0, 1, plan(("a",))), committed(2.0, 1)]
    assert sample_of(entries).mfu is None


def test_numbers_that_are_none_can_be_written_as_json():
    sample = sample_of([job_started(("a",)), adopted(1.0, 1, plan(("a",))), committed(2.0, 1, loss=math.nan)])
    assert sample.loss is None
    json.dumps(sample.to_dict(), allow_nan=False)


def test_prometheus_own_parser_reads_the_text():
    sample = sample_of(run_with_a_loss())
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(sample, "gpt2-demo"))}
    samples = [each for family in families.values() for each in family.samples]
    assert {each.labels["run"] for each in samples} == {"gpt2-demo"}
    values = {each.name: each.value for each in samples if "state" not in each.labels}
    assert values["oobleck_step_total"] == 120
    assert values["oobleck_loss"] == sample.loss
    states = {each.labels["state"]: each.value for each in families["oobleck_time_seconds"].samples}
    assert states == {"useful": sample.useful_s, **sample.downtime_s}
    kinds = {name: family.type for name, family in families.items()}
    assert (kinds["oobleck_step"], kinds["oobleck_loss"]) == ("counter", "gauge")


def test_every_number_of_a_sample_is_exported_to_prometheus():
    numbers = {part.name for part in fields(MetricSample)} - {"t_s", "useful_s", "downtime_s"}
    sample = replace(sample_of(run_with_a_loss()), **dict.fromkeys(numbers, 1))
    exported = [line for line in prometheus_text(sample, "gpt2-demo").splitlines() if line.startswith("# TYPE")]
    assert len(exported) == len(numbers) + 1  # the time in each state is one more


def test_rows_are_a_table_of_plain_columns():
    rows = metric_rows(run_with_a_loss(steps=30, lost_at=10))
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert {"loss", "tokens_per_s", "downtime_starting_s"} <= rows[0].keys()
    plain = (int, float, type(None))
    assert all(isinstance(value, plain) for row in rows for value in row.values())
    assert rows[-1]["recoveries"] == 1

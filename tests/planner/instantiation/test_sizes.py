from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import NetworkProfile
from oobleck.planner.costs import Timing
from oobleck.planner.instantiation.sizes import SizeOption, choose_sizes, reduction_s, sizing_of
from tests.examples import examples
from tests.planner.drawing import make_network


@st.composite
def options(draw: st.DrawFn) -> dict[int, SizeOption]:
    """Sizes with holes, larger ones not always faster, and bytes to reduce in no order."""
    sizes = draw(st.sets(st.integers(1, 8), min_size=1, max_size=5))
    found = {}
    for size in sorted(sizes):
        next_s = draw(st.integers(4, 40)) / size
        first_s = next_s * size * draw(st.sampled_from((0.4, 1.0, 1.3)))
        found[size] = SizeOption(
            timing=Timing(first_s=max(first_s, next_s), next_s=next_s), reduced_bytes=draw(st.integers(0, 9)) * 100
        )
    return found


def all_sizings(sizes: list[int], num_nodes: int, fewest: int, most: int) -> Iterator[tuple[int, ...]]:
    for number in range(fewest, most + 1):
        for chosen in itertools.combinations_with_replacement(sizes, number):
            if sum(chosen) <= num_nodes:
                yield chosen


@examples(400)
@given(data=st.data(), sizes=options(), inter=st.sampled_from((10.0, 1e3, 1e5)))
def test_no_other_sizes_are_faster(data: st.DataObject, sizes: dict[int, SizeOption], inter: float) -> None:
    smallest = min(sizes)
    num_nodes = data.draw(st.integers(smallest, 13), label="nodes")
    num_microbatches = data.draw(st.integers(1, 12), label="microbatches")
    limit = min(num_nodes // smallest, num_microbatches)
    fewest = data.draw(st.integers(1, limit), label="fewest")
    most = data.draw(st.integers(fewest, limit), label="most")
    network = make_network(inter=inter)
    found = choose_sizes(
        sizes, num_nodes=num_nodes, num_microbatches=num_microbatches, network=network, fewest=fewest, most=most
    )
    assert fewest <= len(found.sizes) <= most
    assert sum(found.sizes) <= num_nodes
    assert sum(found.num_microbatches) == num_microbatches
    assert min(found.num_microbatches) >= 1
    best_s = min(
        sizing_of(sizes, chosen, num_microbatches, network).step_s
        for chosen in all_sizings(sorted(sizes), num_nodes, fewest, most)
    )
    assert found.step_s == pytest.approx(best_s, rel=1e-9)


def linear_options(sizes: range, bubble: float = 0.0) -> Mapping[int, SizeOption]:
    return {
        size: SizeOption(timing=Timing(first_s=12.0 + bubble * size, next_s=12.0 / size), reduced_bytes=1200 // size)
        for size in sizes
    }


def choose(sizes: Mapping[int, SizeOption], num_nodes: int, num_microbatches: int, fewest: int = 1, most: int = 99):
    return choose_sizes(
        sizes,
        num_nodes=num_nodes,
        num_microbatches=num_microbatches,
        network=make_network(inter=1e6),
        fewest=fewest,
        most=min(most, num_nodes // min(sizes), num_microbatches),
    )


def test_two_pipelines_of_four_nodes_are_even() -> None:
    assert choose(linear_options(range(1, 5)), 4, 8, fewest=2, most=2).sizes == (2, 2)


def test_two_pipelines_of_three_nodes_use_all() -> None:
    assert choose(linear_options(range(1, 5)), 3, 8, fewest=2, most=2).sizes == (2, 1)


def test_a_node_that_would_only_hurt_stays_a_spare() -> None:
    sizes = {2: linear_options(range(2, 3))[2], 3: SizeOption(timing=Timing(first_s=90, next_s=30), reduced_bytes=1)}
    assert choose(sizes, 5, 8).sizes == (2, 2)


def test_fewer_microbatches_than_pipelines_that_fit() -> None:
    assert len(choose(linear_options(range(1, 5)), 40, 3, fewest=2).sizes) == 3


def test_thousands_of_nodes_with_a_remainder() -> None:
    sizes = linear_options(range(5, 17), bubble=1.0)
    found = choose(sizes, 4093, 9001, fewest=2, most=4093)
    assert sum(found.sizes) <= 4093
    assert sum(found.num_microbatches) == 9001
    # No plan can do better than nodes without remainders.
    assert found.step_s >= min(o.timing.first_s + (9001 * n / 4093 - 1) * o.timing.next_s for n, o in sizes.items())


def test_one_pipeline_reduces_nothing_and_many_reduce_alike() -> None:
    network = make_network()
    assert reduction_s(network, 1000, 1) == 0.0
    assert reduction_s(network, 1000, 2) == pytest.approx(1000 / network.inter_node_bytes_per_s + 2 * 0.01)
    assert reduction_s(network, 1000, 16) == reduction_s(network, 1000, 4000)


def test_slow_links_ask_for_fewer_pipelines() -> None:
    sizes = linear_options(range(1, 9), bubble=1.0)
    counts = [
        len(
            choose_sizes(
                sizes,
                num_nodes=8,
                num_microbatches=32,
                network=NetworkProfile(
                    inter_node_bytes_per_s=rate,
                    inter_node_latency_s=0.0,
                    intra_node_bytes_per_s=1.0,
                    intra_node_latency_s=0.0,
                ),
                fewest=1,
                most=8,
            ).sizes
        )
        for rate in (1e9, 10.0)
    ]
    assert counts == [8, 1]

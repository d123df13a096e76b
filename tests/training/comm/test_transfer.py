"""Layers that change hands arrive as they were, from all of their holders, within a bounded amount of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.steps.groups import transfer_key, transfer_keys
from oobleck.planner import LayerTransfer, WorkerId
from oobleck.training.comm.transfer import LayerState, cut_into_chunks, exchange_layers
from tests.training.table import LinkedTable, acquaint

A, B, C, D = (WorkerId(node=node, device=0) for node in "abcd")


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[tuple[LayerTransfer, ...], dict[int, int]]:
    """Transfers of some layers, each in parts from all of its sources to all of its targets; and layers' sizes."""
    sizes = {layer: draw(st.integers(0, 50)) for layer in range(draw(st.integers(1, 4)))}
    transfers = []
    for layer in sizes:
        sources = draw(st.sampled_from([(A,), (A, B), (B,)]))
        for target in draw(st.sampled_from([(C,), (D,), (C, D)])):
            transfers += [
                LayerTransfer(layer=layer, source=source, target=target, part=part, num_parts=len(sources))
                for part, source in enumerate(sources)
            ]
    return tuple(transfers), sizes


@given(exchange=exchanges(), max_elements=st.integers(1, 60))
def test_chunks_bring_every_element_to_every_target_once(
    exchange: tuple[tuple[LayerTransfer, ...], dict[int, int]], max_elements: int
) -> None:
    transfers, sizes = exchange
    chunks = cut_into_chunks(transfers, sizes.__getitem__, max_elements)
    pairs = {(item.source, item.target) for item in transfers}
    for source, target in pairs:
        tags = [chunk.tag for chunk in chunks if (chunk.transfer.source, chunk.transfer.target) == (source, target)]
        assert tags == list(range(len(tags)))
        mine = [item for item in transfers if source in (item.source, item.target)]
        assert cut_into_chunks(mine, sizes.__getitem__, max_elements) == [
            chunk for chunk in chunks if source in (chunk.transfer.source, chunk.transfer.target)
        ], "whoever knows its own transfers alone numbers them alike"
    assert all(0 < chunk.stop - chunk.first <= max_elements for chunk in chunks)
    brought = Counter(
        (chunk.transfer.layer, chunk.transfer.target, element)
        for chunk in chunks
        for element in range(chunk.first, chunk.stop)
    )
    targets = {(item.layer, item.target) for item in transfers}
    assert brought == Counter((layer, target, at) for layer, target in targets for at in range(sizes[layer]))


def test_sources_take_turns() -> None:
    transfers = [
        LayerTransfer(layer=0, source=source, target=C, part=part, num_parts=2) for part, source in enumerate((A, B))
    ]
    sources = [chunk.transfer.source for chunk in cut_into_chunks(transfers, lambda _: 100, 10)]
    assert sources == [A, B] * 5


class Worker:
    """One of several workers in this process: its groups, and the layers that it holds."""

    def __init__(self, worker_id: WorkerId, layers: Mapping[int, LayerState]) -> None:
        self.worker_id = worker_id
        self.layers = layers
        self.told: list[tuple[int, int]] = []
        self.table = LinkedTable(worker_id)
        self.groups = self.table.groups

    def exchange(
        self, transfers: tuple[LayerTransfer, ...], shapes: Mapping[int, LayerState], chunk_bytes: int
    ) -> dict[int, LayerState]:
        mine = [item for item in transfers if self.worker_id in (item.source, item.target)]
        self.groups.form(transfer_keys(mine, 1, self.worker_id), lambda: False, generation=1)
        return exchange_layers(
            mine,
            worker_id=self.worker_id,
            group_of=lambda item: self.groups[transfer_key(item, 1)],
            waiter=self.table.waiter,
            state_of=self.layers.__getitem__,
            empty_state=lambda layer: tuple(torch.empty_like(tensor) for tensor in shapes[layer]),
            size_of=lambda layer: sum(tensor.numel() for tensor in shapes[layer]),
            element_bytes=4,
            on_progress=lambda received, whole: self.told.append((received, whole)),
            interrupted=lambda: False,
            chunk_bytes=chunk_bytes,
        )


def exchange_among(
    held: Mapping[WorkerId, Mapping[int, LayerState]], transfers: tuple[LayerTransfer, ...], chunk_bytes: int
) -> tuple[dict[WorkerId, dict[int, LayerState]], list[Worker]]:
    workers = [Worker(worker_id, layers) for worker_id, layers in held.items()]
    acquaint([worker.table for worker in workers])
    shapes = {layer: state for layers in held.values() for layer, state in layers.items()}
    with ThreadPoolExecutor(len(workers)) as pool:
        results = pool.map(lambda worker: worker.exchange(transfers, shapes, chunk_bytes), workers)
        return {worker.worker_id: result for worker, result in zip(workers, results, strict=True)}, workers


def state_of(layer: int) -> LayerState:
    """Tensors of several shapes and types, as optimizers keep them."""
    generator = torch.Generator().manual_seed(layer)
    shapes: list[tuple[int, ...]] = [(40, 30), (40, 30), (), (7,), (7,), ()]
    state = [torch.randn(shape, generator=generator) for shape in shapes]
    return (*state[:2], state[2].double(), *state[3:5], state[5].double())


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
def test_two_targets_receive_what_two_sources_hold(chunk_bytes: int) -> None:
    layers = {layer: state_of(layer) for layer in range(3)}
    transfers = tuple(
        LayerTransfer(layer=layer, source=source, target=target, part=part, num_parts=2)
        for layer in layers
        for target in (C, D)
        for part, source in enumerate((A, B))
    )
    received, _ = exchange_among({A: layers, B: layers, C: {}, D: {}}, transfers, chunk_bytes)
    assert received[A] == received[B] == {}
    for target in (C, D):
        assert received[target].keys() == layers.keys()
        for layer, state in layers.items():
            for own, expected in zip(received[target][layer], state, strict=True):
                assert own.dtype == expected.dtype
                assert torch.equal(own, expected)


def test_workers_that_give_to_each_other_do_not_wait_for_each_other() -> None:
    """Each sends far more than one window holds before it has received anything."""
    layers = {layer: (torch.full((5_000,), float(layer)),) for layer in range(4)}
    transfers = (
        *(LayerTransfer(layer=layer, source=A, target=B) for layer in (0, 1)),
        *(LayerTransfer(layer=layer, source=B, target=A) for layer in (2, 3)),
    )
    held = {A: {layer: layers[layer] for layer in (0, 1)}, B: {layer: layers[layer] for layer in (2, 3)}}
    received, _ = exchange_among(held, transfers, 400)
    assert torch.equal(received[A][3][0], layers[3][0])
    assert torch.equal(received[B][1][0], layers[1][0])


@pytest.mark.slow
def test_an_exchange_takes_no_more_memory_than_its_layers_and_256_mib() -> None:
    """Source and target are in this process, so both their buffers count. A long one tells of its progress."""
    layers = {layer: (torch.ones(50 << 20), torch.ones(7), torch.ones(50 << 20)) for layer in range(3)}
    size_bytes = sum(tensor.nbytes for state in layers.values() for tensor in state)
    transfers = tuple(LayerTransfer(layer=layer, source=A, target=C) for layer in layers)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    received, workers = exchange_among({A: layers, C: {}}, transfers, 16 << 20)
    assert _peak_bytes() - before < size_bytes + (256 << 20)
    assert all(torch.equal(own, one) for own, one in zip(received[C][2], layers[2], strict=True))
    told = workers[1].told
    assert told == sorted(told)
    assert all(0 < part <= whole == size_bytes for part, whole in told)


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

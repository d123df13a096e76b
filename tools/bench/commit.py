"""What a commit costs as workers are added: up and down a tree of links, beside a ring over all of them.

    python tools/bench/commit.py                         8 to 128 processes
    python tools/bench/commit.py --ranks 16 --rounds 100

Each rank is a process of its own, all on this machine. They begin each round together; a round's time is that of the
rank that is last to know the total, and the table has medians. Where there are fewer cores than ranks, times grow with
the processor seconds of all ranks: look at those of one rank, at the hops, and at the connections.

The ring is Gloo's all-reduce of 4 + B doubles for B microbatches, two a rank: the commit as it was before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from oobleck.control.protocol import PartUp, Subject, Tally, Topic, TotalDown, Totals
from oobleck.control.steps import Committee, hops_up
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate, WorkerId
from oobleck.training.comm import PeerAgreements, PeerLinks, Waiter, open_device
from tools.smoke import parse_arguments

_ADDRESS = "127.0.0.1"
_TIMEOUT_S = 280.0
_MICROBATCHES = 2
"""Of a rank."""
_PROCESSES = multiprocessing.get_context("fork")
"""What is imported is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way to commit, at one number of ranks."""

    round_s: tuple[float, ...]
    """When each round began and ended on one rank, one after the other."""
    processor_s: float
    """Of one rank, a round."""
    connections: int


def plan_of(num_ranks: int) -> ExecutionPlan:
    """Pipelines of one worker each."""
    template = PipelineTemplate(stages=(StageTemplate(first_layer=0, stop_layer=1, node_index=0),))
    return ExecutionPlan(
        pipelines=tuple(
            Pipeline(template=template, nodes=(f"node{rank}",), num_microbatches=_MICROBATCHES)
            for rank in range(num_ranks)
        )
    )


def measure_tree(rank: int, num_ranks: int, rounds: int, say: Connection, barrier: Barrier) -> Measured:
    """Commit up and down the tree, as workers do."""
    committee = Committee(plan_of(num_ranks), 1)
    worker_id, waiter = WorkerId(f"node{rank}", 0), Waiter()

    def hear(source: WorkerId, message: object) -> None:
        assert isinstance(message, PartUp | TotalDown)
        agreements.hear(source, message)

    links = PeerLinks(worker_id, _ADDRESS, handle=hear, lost=lambda worker_id: agreements.note_lost(worker_id))
    agreements = PeerAgreements(worker_id, waiter, links.send)
    say.send(links.address)
    links.know(say.recv())
    agreements.join(committee)
    part = Totals((0.5, 0.5, 0.0, 0.0), Tally.of(range(rank * _MICROBATCHES, (rank + 1) * _MICROBATCHES)))

    def commit(step: int) -> None:
        total = agreements.total(committee, Subject(Topic.STEP, step), part, lambda: False)
        assert total.counted == Tally.of(range(num_ranks * _MICROBATCHES))

    return _measure(commit, rounds, barrier, lambda: links.num_links)


def measure_ring(rank: int, num_ranks: int, rounds: int, store_path: str, barrier: Barrier) -> Measured:
    """Commit by an all-reduce over a mesh of all ranks."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._timeout = timedelta(seconds=_TIMEOUT_S)
    options._devices = [open_device(_ADDRESS)]
    group: Any = ProcessGroupGloo(FileStore(store_path, num_ranks), rank, num_ranks, options)

    def commit(step: int) -> None:
        del step
        vector = torch.zeros(4 + num_ranks * _MICROBATCHES, dtype=torch.float64)
        vector[4 + rank * _MICROBATCHES : 4 + (rank + 1) * _MICROBATCHES] = 1.0
        group.allreduce([vector], dist.AllreduceOptions()).wait()
        assert bool((vector[4:] == 1.0).all())

    return _measure(commit, rounds, barrier, lambda: num_ranks - 1)


def _measure(
    commit: Callable[[int], None], rounds: int, barrier: Barrier, count_connections: Callable[[], int]
) -> Measured:
    commit(0)  # connections are made
    times: list[float] = []
    processor_s = 0.0
    for number in range(1, rounds + 1):
        barrier.wait()
        began_s, spent_s = time.monotonic(), time.process_time()
        commit(number)
        times += [began_s, time.monotonic()]
        barrier.wait()
        processor_s += time.process_time() - spent_s
    return Measured(round_s=tuple(times), processor_s=processor_s / rounds, connections=count_connections())


def _run_rank(
    measure: Callable[..., Measured],
    rank: int,
    num_ranks: int,
    rounds: int,
    given: object,
    say: Connection,
    barrier: Barrier,
) -> None:
    torch.set_num_threads(1)
    threading.excepthook = lambda _failed: os._exit(1)
    if measure is measure_tree:
        say.send(measure_tree(rank, num_ranks, rounds, say, barrier))
    else:
        say.send(measure_ring(rank, num_ranks, rounds, str(given), barrier))
    os._exit(0)  # groups are not waited for


def measure_all(measure: Callable[..., Measured], num_ranks: int, rounds: int) -> list[Measured]:
    """Run one way to commit on as many processes; returns what each has measured."""
    barrier = _PROCESSES.Barrier(num_ranks, timeout=_TIMEOUT_S)
    pipes = [_PROCESSES.Pipe() for _ in range(num_ranks)]
    with tempfile.TemporaryDirectory(prefix="obcommit") as directory:
        ranks = [
            _PROCESSES.Process(
                target=_run_rank,
                args=(measure, rank, num_ranks, rounds, Path(directory) / "store", pipes[rank][1], barrier),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            for each in ranks:
                each.start()
            if measure is measure_tree:
                addresses = [_heard(pipe[0]) for pipe in pipes]
                for pipe in pipes:
                    pipe[0].send(addresses)
            return [_heard(pipe[0]) for pipe in pipes]
        finally:
            for each in ranks:
                each.kill()
                each.join()


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"a rank has said nothing for {_TIMEOUT_S:.0f} s")
    return pipe.recv()


def _median_s(measured: Sequence[Measured]) -> float:
    """From when the last rank began a round to when the last had the total, the median of all rounds."""
    rounds = range(0, len(measured[0].round_s), 2)
    return statistics.median(
        max(each.round_s[at + 1] for each in measured) - max(each.round_s[at] for each in measured) for at in rounds
    )


def _cells(measured: Sequence[Measured], hops: int) -> str:
    processor_s = statistics.mean(each.processor_s for each in measured)
    connections = max(each.connections for each in measured)
    return f"{hops} | {1e3 * _median_s(measured):.2f} | {1e3 * processor_s:.2f} | {connections}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 16, 32, 64, 128))
    parser.add_argument("--rounds", type=int, default=20)
    asked = parse_arguments(parser, arguments, ranks=(2, 5), rounds=2)
    titles = "hops | ms | cpu ms a rank | connections"
    print(f"| ranks | tree: {titles} | ring: {titles} |\n|{'---|' * 9}", flush=True)
    for num_ranks in asked.ranks:
        tree = _cells(measure_all(measure_tree, num_ranks, asked.rounds), 2 * hops_up(plan_of(num_ranks).worker_ids))
        ring = _cells(measure_all(measure_ring, num_ranks, asked.rounds), 2 * (num_ranks - 1))
        print(f"| {num_ranks} | {tree} | {ring} |", flush=True)


if __name__ == "__main__":
    main()

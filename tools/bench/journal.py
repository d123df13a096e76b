"""How long a new master takes to read what a long run has left, with an image of the journal and without.

    python tools/bench/journal.py --days 1 7 30 --nodes 2048

The journal is as a run of so many nodes writes it: pipelines of eight nodes, a step every few seconds, a node that is
lost every few hours and comes back an hour later. It is read by a process of its own each time: the whole of it, which
is what every takeover did before and still does where there is no image; and from an image that is as old as it ever
gets. Both must come to the same. Beside the journal's size is what it was with whole plans.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.cli.wiring.past import LEAST_BYTES, TIMES_AS_LONG, read_past
from oobleck.control.journal import (
    Action,
    ConnectionLost,
    JobStarted,
    JournalEntry,
    LossCause,
    NodeAdded,
    NodeConnected,
    NodeLost,
    PlanAdopted,
    PlanCause,
    PlanPacker,
    ProfileKnown,
    RecoveryDone,
    RecoveryStarted,
    StepDone,
    WorkerUp,
)
from oobleck.control.protocol import CommitRecord
from oobleck.control.replay import RunBooks
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import (
    ExecutionPlan,
    Pipeline,
    PipelineTemplate,
    StageTemplate,
    device_sheet,
    estimate_profile,
    model_shape,
    profile_to_json,
)
from oobleck.runtime.journals import read_entries, write_image
from oobleck.schedule import ScheduleKind
from oobleck.wire import encode_json
from tools.smoke import parse_arguments

_STAGES, _EACH = 8, 3
"""Stages of a pipeline, and layers of a stage."""
_MICROBATCHES_EACH = 8
_DAY_S, _HOUR_S = 86_400.0, 3600.0
_TEMPLATE = PipelineTemplate(
    stages=tuple(
        StageTemplate(first_layer=_EACH * index, stop_layer=_EACH * (index + 1), node_index=index)
        for index in range(_STAGES)
    )
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--days", type=float, nargs="+", default=(1.0, 7.0, 30.0))
    parser.add_argument("--step", type=float, default=3.46, help="seconds that a step takes")
    parser.add_argument("--mtbf-h", type=float, default=3.1, help="hours between losses, of the whole cluster")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    asked = parse_arguments(parser, arguments, nodes=160, days=(0.5,), step=60.0)
    if asked.read is not None:
        print(json.dumps(_read(asked.read, is_whole=asked.whole)))
        return
    print(f"{asked.nodes} nodes, a step every {asked.step:g} s, a loss every {asked.mtbf_h:g} h\n")
    columns = ("days", "steps", "plans", "MB", "with whole plans", "image, KB", "made in, s")
    whole = ("all read in, s", "cpu s", "memory, MB")
    print("|", " | ".join((*columns, *whole, *(f"image: {name}" for name in whole))), "|")
    print("|" + "---|" * (len(columns) + 2 * len(whole)), flush=True)
    for days in asked.days:
        with tempfile.TemporaryDirectory(prefix="objournal") as directory:
            path = Path(directory) / "journal.jsonl"
            num_steps, num_plans, saved_bytes = _write(path, asked, days)
            every, some = (_read_apart(path, *more) for more in (("--whole",), ()))
            if every["came_to"] != some["came_to"]:
                raise RuntimeError(f"from its image the journal came to {some['came_to']}, not {every['came_to']}")
            size = path.stat().st_size
            cells = [
                *(f"{days:g}", f"{num_steps:,}", f"{num_plans:,}", f"{size / 1e6:,.1f}"),
                *(
                    f"{(size + saved_bytes) / 1e6:,.1f}",
                    f"{every['image_bytes'] / 1e3:,.0f}",
                    f"{every['image_s']:.2f}",
                ),
                *(f"{each[key]:,.2f}" for each in (every, some) for key in ("took_s", "processor_s", "memory_mb")),
            ]
            print("|", " | ".join(cells), "|", flush=True)


# --- the journal -----------------------------------------------------------------------------------------------------


def _write(path: Path, asked: argparse.Namespace, days: float) -> tuple[int, int, int]:
    """Write a journal; returns how many steps and plans it has, and what plans save by being changes."""
    packer = PlanPacker()
    num_steps = num_plans = saved_bytes = 0
    step_line = _step_line(step=987_654, t_s=5678.9, generation=4_321_987)
    for told, form in ((b"5678.9", b"%.3f"), (b"987654", b"%d"), (b"4321987", b"%d")):
        assert step_line.count(told) == 1
        step_line = step_line.replace(told, form)  # to encode each of millions would take minutes
    with path.open("wb") as file:
        generation, done = 0, 0
        for entry, until_s in _events(asked.nodes, days * _DAY_S, asked.mtbf_h * _HOUR_S):
            line = encode_json(packer.line(entry))
            file.write(line)
            if isinstance(entry, PlanAdopted):
                generation, num_plans = entry.generation, num_plans + 1
                saved_bytes += len(encode_json(entry)) - len(line)
            if isinstance(entry, RecoveryDone) or generation == num_plans == 1:
                while (t_s := (done + 1) * asked.step) < until_s:
                    done += 1
                    file.write(step_line % (t_s, done, generation))
        num_steps = done
    return num_steps, num_plans, saved_bytes


def _step_line(*, step: int, t_s: float, generation: int) -> bytes:
    record = CommitRecord(
        step=step, generation=generation, loss=2.718281828, grad_norm=1.0123456789, learning_rate=3e-4,
        num_samples=8192, samples_repeated=0, samples_missing=0, duration_s=3.4567891,
    )  # fmt: skip
    return encode_json(StepDone(t_s=t_s, record=record, tokens=16_777_216))


def _events(num_nodes: int, duration_s: float, mtbf_s: float) -> Iterator[tuple[JournalEntry, float]]:
    """All entries but steps, each with the time until which steps follow it if a plan is in force."""
    nodes = tuple(f"node{index:05}" for index in range(num_nodes // _STAGES * _STAGES))
    rows = [nodes[index : index + _STAGES] for index in range(0, len(nodes), _STAGES)]
    job, generation = JobSpec(tag="year", max_steps=10**9), 1
    specs = tuple(NodeSpec(name=node, host=node) for node in nodes)
    profile = estimate_profile(model_shape("gpt2-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024)
    yield JobStarted(t_s=0.0, version="0", job=job, nodes=specs, started_at="2026-01-01T00:00:00Z"), 0.0
    yield ProfileKnown(t_s=0.0, profile_json=profile_to_json(profile)), 0.0
    for index, node in enumerate(nodes):
        yield NodeConnected(t_s=1.0, node=node, agent_pid=1000 + index), 0.0
        yield WorkerUp(t_s=2.0, node=node, device=0, pid=5000 + index, data_digest="d"), 0.0
    yield _adopted(3.0, 1, rows, None), mtbf_s
    number, t_s = 0, mtbf_s
    while t_s < duration_s:
        row = 7 * number % len(rows)
        node = rows[row][number % _STAGES]
        comes_s, number = min(t_s + _HOUR_S, t_s + mtbf_s / 2), number + 1
        yield NodeLost(t_s=t_s, node=node, loss=ConnectionLost(), is_tried_again=True), 0.0
        yield from _recovery(t_s, generation + 1, rows, row, node, PlanCause.LOSS, comes_s)
        yield NodeAdded(t_s=comes_s, node=specs[0] if node == nodes[0] else NodeSpec(name=node, host=node)), 0.0
        yield NodeConnected(t_s=comes_s, node=node, agent_pid=number), 0.0
        yield WorkerUp(t_s=comes_s, node=node, device=0, pid=number, data_digest="d"), 0.0
        t_s += mtbf_s
        yield from _recovery(comes_s, generation + 2, rows, None, node, PlanCause.JOINED, min(t_s, duration_s))
        generation += 2


def _recovery(
    t_s: float, generation: int, rows: Sequence[Sequence[str]], left_out: int | None, node: str, cause: PlanCause,
    until_s: float,
) -> Iterator[tuple[JournalEntry, float]]:  # fmt: skip
    loss = LossCause.CONNECTION_LOST if cause is PlanCause.LOSS else None
    yield RecoveryStarted(t_s=t_s, generation=generation, nodes=(node,), cause=cause, loss=loss), 0.0
    yield _adopted(t_s, generation, rows, left_out), 0.0
    done = RecoveryDone(
        t_s=t_s, began_s=t_s, generation=generation, nodes=(node,), cause=cause, loss=loss, action=Action.REINSTANTIATE,
        detect_s=0.0, decide_s=0.1, transfer_s=0.2, stall_s=0.3, bytes_moved=10**9, layers_moved=3,
        microbatches_redone=4, steps_lost=0,
    )  # fmt: skip
    yield done, until_s


def _adopted(t_s: float, generation: int, rows: Sequence[Sequence[str]], left_out: int | None) -> PlanAdopted:
    """A plan of all rows, or of all but one, whose nodes wait."""
    used = [tuple(row) for index, row in enumerate(rows) if index != left_out]
    share, rest = divmod(_MICROBATCHES_EACH * len(rows), len(used))
    pipelines = tuple(
        Pipeline(template=_TEMPLATE, nodes=row, num_microbatches=share + (index < rest))
        for index, row in enumerate(used)
    )
    return PlanAdopted(
        t_s=t_s,
        generation=generation,
        plan=ExecutionPlan(pipelines=pipelines, spares=() if left_out is None else tuple(rows[left_out])),
        action=Action.REINSTANTIATE if generation > 1 else Action.START,
        reason=f"{len(used)} pipelines",
        predicted_step_s=3.46,
        num_layers=_STAGES * _EACH,
        redundant=True,
        pipeline_generations=(1,) * len(used),
        schedules=(ScheduleKind.ONE_F_ONE_B,) * len(used),
        oldest=max(1, generation - 1),
    )


# --- reading it ------------------------------------------------------------------------------------------------------


def _read_apart(path: Path, *more: str) -> dict[str, float]:
    """Read it in another process, whose memory is its own."""
    command = [sys.executable, __file__, "--read", str(path), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _read(path: Path, *, is_whole: bool) -> dict[str, object]:
    began_s, processor_s = time.perf_counter(), time.process_time()
    image_s, image_bytes = 0.0, 0
    if is_whole:
        books, image_s, image_bytes = _read_all(path)
    else:
        books, _ = read_past(path)
    replayed = books.finish()
    took_s, used_s = time.perf_counter() - began_s - image_s, time.process_time() - processor_s - image_s
    assert replayed is not None
    summary = books.account.summary()
    return {
        "took_s": took_s,
        "processor_s": used_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "image_s": image_s,
        "image_bytes": image_bytes,
        "came_to": [summary.steps_committed, len(summary.recoveries), replayed.generations.current, summary.goodput],
    }


def _read_all(path: Path) -> tuple[RunBooks, float, int]:
    """Read a journal without an image, and leave one that is as old as it ever gets."""
    books, size, took_s, image_bytes = RunBooks(), path.stat().st_size, 0.0, 0
    due = size // 2
    for place, entry in read_entries(path):
        books.apply(entry)
        if place >= due:
            began_s = time.perf_counter()
            image = books.image()
            assert image is not None
            image_bytes = write_image(path, image, place)
            took_s = time.perf_counter() - began_s
            due = max(place + 1, size - max(LEAST_BYTES, TIMES_AS_LONG * image_bytes)) if due == size // 2 else 2 * size
    return books, took_s, image_bytes


if __name__ == "__main__":
    main()

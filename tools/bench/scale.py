"""What a lost node costs as the cluster grows: real workers, groups, the control plane alone, and the simulator.

    python tools/bench/scale.py --output scale.json --svg scale.svg
    python tools/bench/scale.py --sections control --control 64 4096 --beside before.json

Four sections, each with its numbers of nodes (of one device each):

- `workers`: real workers as virtual nodes of this machine; one node is killed. The clock is shared by all of them, so
  seconds grow with N by themselves where there are few cores: look at the processor seconds, bytes and sockets.
- `groups`: ranks as threads of one process form a group of all and sum in it: as a ring, and all connected to all.
- `control`: the coordinator alone, with agents and workers that only answer: what a loss has the master decide, say
  and read. Then the loss of a rack at once, and what gives a checkpoint its manifest.
- `simulator`: one lost node in the sweep mode, by the costs that the simulator knows.

The baseline is the run's own: each table ends with the growth from its smallest N to its largest, beside the growth of
log2 N. With `--beside FILE`, what an earlier `--output` has for the same N stands in brackets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.control.journal import summarize
from oobleck.planner import device_sheet, estimate_profile, model_shape
from oobleck.sim.sweep import SweepSettings, sweep
from oobleck.sim.trace import Lost, Trace
from tools.bench.recovery import end_runs_when_terminated
from tools.bench.scale_control import ControlPlane, measure_loss, measure_manifest
from tools.bench.scale_groups import measure_groups
from tools.bench.scale_workers import measure_kill
from tools.curves import Curve, curves_svg
from tools.smoke import parse_arguments

_SECTIONS = ("workers", "groups", "control", "simulator")
_MOST_SAVING = 1024
"""A manifest is as long for any number of nodes."""
_KILO, _MEGA = 1e3, 1e6
_LOST_AT_S, _SIMULATED_S = 600.0, 1200.0

Row = Mapping[str, Any]
"""A measurement as the JSON has it."""
Columns = Mapping[str, Callable[[Row], float | None]]
"""The columns of a table after that of N."""

_WORKERS: Columns = {
    "spares": lambda row: row["spares"],
    "step, s": lambda row: row["step_s"],
    "decided, s": lambda row: row["decide_s"],
    "stall, s": lambda row: row["stall_s"],
    "done, s": lambda row: row["done_s"],
    "master, cpu s": lambda row: row["master_s"],
    "master sent, KB": lambda row: None if row["sent_bytes"] is None else row["sent_bytes"] / _KILO,
    "a worker, cpu s": lambda row: row["worker_s"],
    "cores, busy": lambda row: row["busy"],
    "its sockets before": lambda row: row["sockets_before"],
    "after": lambda row: row["sockets_after"],
}
_GROUPS: Columns = {
    "ring, s": lambda row: row["ring"]["wall_s"],
    "cpu s": lambda row: row["ring"]["cpu_s"],
    "descriptors a rank": lambda row: row["ring"]["descriptors"],
    "links a rank": lambda row: row["ring"]["links"],
    "a sum, s": lambda row: row["ring"]["sum_s"],
    "mesh, s": lambda row: row["mesh"]["wall_s"],
    "its cpu s": lambda row: row["mesh"]["cpu_s"],
    "its descriptors": lambda row: row["mesh"]["descriptors"],
    "its links": lambda row: row["mesh"]["links"],
    "its sum, s": lambda row: row["mesh"]["sum_s"],
}
_CONTROL: Columns = {
    "generations": lambda row: row["generations"],
    "fences": lambda row: row["fences"]["number"],
    "their KB": lambda row: row["fences"]["bytes"] / _KILO,
    "decide, cpu s": lambda row: row["decide_s"],
    "an update, KB": lambda row: row["updates"]["largest_bytes"] / _KILO,
    "all, MB": lambda row: row["updates"]["bytes"] / _MEGA,
    "encode, cpu s": lambda row: row["updates"]["encode_s"] + row["fences"]["encode_s"],
    "answers, cpu s": lambda row: row["answers_decode_s"],
    "journal, KB": lambda row: row["journal_bytes"] / _KILO,
    "master, cpu s": lambda row: row["master_s"],
}
_MANIFESTS: Columns = {
    "manifest, KB": lambda row: row["largest_bytes"] / _KILO,
    "sent, MB": lambda row: row["bytes"] / _MEGA,
    "encode, cpu s": lambda row: row["encode_s"],
}
_SIMULATED: Columns = {"decided, s": lambda row: row["decide_s"], "stall, s": lambda row: row["stall_s"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    asked = _parse(arguments)
    before: dict[str, list[Row]] = {}
    if asked.beside is not None:
        before = json.loads(asked.beside.read_text(encoding="utf-8"))
    measured: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "python": platform.python_version()}}

    def table(key: str, title: str, rows: Iterable[Row], columns: Columns) -> None:
        print(f"\n{title}\n")
        measured[key] = _print_table(rows, columns, before.get(key, []))

    if "workers" in asked.sections:
        kills = (asdict(measure_kill(number, asked.runs)) for number in asked.workers)
        table("workers", f"Real workers, one killed node, median of {asked.runs}:", kills, _WORKERS)
    if "groups" in asked.sections:
        formed = ({"nodes": number, **_groups(number)} for number in asked.groups)
        table("groups", "Ranks as threads, one group of all:", formed, _GROUPS)
    if "control" in asked.sections:
        losses = (_lose(number, 1) for number in asked.control)
        table("control", "The control plane alone, one lost node:", losses, _CONTROL)
        of, number = asked.rack
        table("rack", f"The control plane alone, {number} of {of} nodes at once:", (_lose(of, number),), _CONTROL)
        manifests = (
            {"nodes": number, **asdict(measure_manifest(ControlPlane(number)))}
            for number in asked.control
            if number <= _MOST_SAVING
        )
        table("manifests", "The control plane alone, the end of a save:", manifests, _MANIFESTS)
    if "simulator" in asked.sections:
        table("simulator", "The simulator, one lost node:", map(_simulate, asked.simulated), _SIMULATED)
    if asked.output is not None:
        asked.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if asked.svg is not None:
        asked.svg.write_text(_picture(measured, before), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", choices=_SECTIONS, nargs="+", default=_SECTIONS)
    parser.add_argument("--workers", type=int, nargs="+", default=(4, 8, 16), help="numbers of real workers")
    parser.add_argument("--runs", type=int, default=5, help="of real workers, for each number of them")
    parser.add_argument("--groups", type=int, nargs="+", default=(8, 16, 32), help="numbers of ranks")
    parser.add_argument("--control", type=int, nargs="+", default=(16, 64, 256, 1024, 4096, 10_000))
    parser.add_argument("--rack", type=int, nargs=2, default=(4096, 64), metavar=("N", "LOST"))
    parser.add_argument("--simulated", type=int, nargs="+", default=(64, 256, 1024, 4096, 10_000))
    parser.add_argument("--output", type=Path, help="write what was measured to this file, as JSON")
    parser.add_argument("--svg", type=Path, help="draw seconds against N")
    parser.add_argument("--beside", type=Path, help="what an earlier --output has is shown, and drawn, beside this")
    return parse_arguments(
        parser, arguments, workers=(2,), runs=1, groups=(2, 4), control=(16, 64), rack=(64, 8), simulated=(32, 64)
    )


def _lose(number: int, lost: int) -> Row:
    loss = measure_loss(ControlPlane(number), lost)
    return {**asdict(loss), "master_s": loss.master_s, "sent_bytes": loss.sent_bytes}


def _groups(number: int) -> Row:
    return {kind: asdict(formed) for kind, formed in measure_groups(number).items()}


def _simulate(number: int) -> Row:
    nodes = tuple(f"node{index}" for index in range(number))
    lost = Lost(t_s=_LOST_AT_S, node=nodes[number // 2])
    trace = Trace(duration_s=_SIMULATED_S, nodes=nodes, start=nodes, events=(lost,))
    profile = estimate_profile(
        model_shape("gpt3-6.7b"), device_sheet("A100"), microbatch_size=1, sequence_length=2048, precision="bfloat16"
    )
    summary = summarize(sweep(trace, SweepSettings(profile=profile, global_batch_size=4 * number)))
    (recovery,) = summary.recoveries
    return {
        "nodes": number,
        "decide_s": recovery.decide_s,
        "stall_s": recovery.stall_s,
        "goodput": summary.goodput,
    }


def _print_table(rows: Iterable[Row], columns: Columns, before: Sequence[Row]) -> list[Row]:
    """Print each row as soon as it is measured, then the growth; returns the rows."""
    print(f"| N | {' | '.join(columns)} |")
    print(f"|{'---|' * (len(columns) + 1)}", flush=True)
    earlier = {row["nodes"]: row for row in before}
    done: list[Row] = []
    for row in rows:
        cells = [_cell(value(row), row, earlier.get(row["nodes"]), value) for value in columns.values()]
        print(f"| {row['nodes']:,} | {' | '.join(cells)} |", flush=True)
        done.append(row)
    if len(done) > 1:
        small, large = (pick(done, key=lambda row: int(row["nodes"])) for pick in (min, max))
        growths = [_growth(value(small), value(large)) for value in columns.values()]
        print(f"| {small['nodes']:,} to {large['nodes']:,} | {' | '.join(growths)} |")
        times = math.log2(large["nodes"]) / math.log2(small["nodes"])
        print(f"\nN grows {large['nodes'] / small['nodes']:.3g} times, log2 N {times:.2f} times.", flush=True)
    return done


def _cell(number: float | None, row: Row, earlier: Row | None, value: Callable[[Row], float | None]) -> str:
    return _number(number) if earlier is None else f"{_number(number)} ({_number(value(earlier))})"


def _number(number: float | None) -> str:
    if number is None:
        return "?"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _growth(small: float | None, large: float | None) -> str:
    return f"x {large / small:.3g}" if small and large is not None else ""


def _picture(measured: Mapping[str, Any], before: Mapping[str, Sequence[Row]]) -> str:
    curves: dict[str, Curve] = {}
    for words, rows in ((", earlier", before), ("", measured)):
        curves |= {
            f"{name}{words}": curve
            for name, key, field in (
                ("real workers: stall", "workers", "stall_s"),
                ("control plane alone: cpu", "control", "master_s"),
                ("simulator: stall", "simulator", "stall_s"),
            )
            if (curve := [(row["nodes"], row[field]) for row in rows.get(key, ()) if row[field] > 0])
        }
    (first_x, first_y), *_ = curves.get("control plane alone: cpu") or next(iter(curves.values()))
    last_x = max(x for curve in curves.values() for x, _ in curve)
    xs = [first_x * 2**power for power in range(math.ceil(math.log2(last_x / first_x)))] + [last_x]
    curves["as log2 N"] = [(x, first_y * math.log2(x) / math.log2(first_x)) for x in xs]
    return curves_svg(
        curves,
        title="One lost node, against the number of nodes",
        x_axis="nodes of one device each",
        y_axis="seconds",
        reference="as log2 N",
    )


if __name__ == "__main__":
    end_runs_when_terminated()
    main()

"""How long the cluster mode takes for one virtual hour of a cluster with heartbeats.

    python tools/bench/cluster_mode.py --nodes 16 --hours 1

GPT-2 medium's shape on nodes with one A40 each, one heartbeat a second from each node, and a failure every ten
minutes, each node coming back five minutes later. Processor seconds of this process, best of `--runs`: the machine
may be busy with something else.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.job import ControlSpec, JobSpec
from oobleck.planner import device_sheet, estimate_profile, model_shape
from oobleck.sim.cluster import ClusterRun, run_cluster
from oobleck.sim.trace import Joined, Lost, Trace, TraceEvent
from tools.smoke import parse_arguments

_FAILURE_EVERY_S = 600.0
_AWAY_S = 300.0


def make_trace(num_nodes: int, duration_s: float) -> Trace:
    """A node fails every ten minutes, in turn."""
    nodes = tuple(f"node{index}" for index in range(num_nodes))
    events: list[TraceEvent] = []
    t_s, index = _FAILURE_EVERY_S / 2, 0
    while t_s + _AWAY_S < duration_s:
        node = nodes[index % num_nodes]
        events += [Lost(t_s=t_s, node=node), Joined(t_s=t_s + _AWAY_S, node=node)]
        t_s, index = t_s + _FAILURE_EVERY_S, index + 1
    return Trace(duration_s=duration_s, nodes=nodes, start=nodes, events=tuple(events))


def play(trace: Trace, batch_size: int) -> ClusterRun:
    profile = estimate_profile(model_shape("gpt2-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024)
    job = JobSpec(
        tag="bench",
        control=ControlSpec(heartbeat_interval_s=1.0, lease_s=5.0),
        max_steps=1_000_000,
        global_batch_size=batch_size,
        microbatch_size=2,
    )
    return run_cluster(trace, job=job, profile=profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4096, help="samples a step: 416 take 1.08 s on 16 nodes")
    arguments = parse_arguments(parser, nodes=4, hours=0.25, runs=1)
    trace = make_trace(arguments.nodes, 3600 * arguments.hours)
    times_s = []
    for _ in range(arguments.runs):
        began_s = time.process_time()
        played = play(trace, arguments.batch)
        times_s.append(time.process_time() - began_s)
    summary = played.summary
    print(
        f"{arguments.nodes} nodes, {arguments.hours:g} virtual hours: {min(times_s):.2f} s of processor time "
        f"(target: 5 s for 16 nodes and 1 hour)"
    )
    assert summary.step_time_s is not None, "an hour has steps"
    print(
        f"{summary.steps_committed} steps of {summary.step_time_s.median:.2f} s, {len(summary.recoveries)} recoveries, "
        f"goodput {summary.goodput:.3f}; journal {played.digest[:16]}"
    )


if __name__ == "__main__":
    main()

"""How long the sweep mode takes for months of a large cluster, and how much memory.

    python tools/bench/simulator.py --nodes 2048 --days 54 --mtbf-h 3.1

The job is GPT-3 6.7B on A100s by an estimate, four samples a node in a step. Times are of this process: processor
seconds, which a busy machine does not change much, and seconds by the clock.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.control.journal import summarize
from oobleck.planner.profiles import device_sheet, estimate_profile, model_shape
from oobleck.sim.costs import Costs
from oobleck.sim.sweep import SweepSettings, sweep
from oobleck.sim.trace import FailureModel, facts_of, generate
from tools.smoke import parse_arguments

_HOUR_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--mtbf-h", type=float, default=3.1, help="hours between losses, of the whole cluster")
    parser.add_argument("--repair-h", type=float, help="hours until a lost node is back; never, if left out")
    parser.add_argument("--only-finishing", action="store_true", help="all costs are 0 but the step in flight's rest")
    given = parse_arguments(parser, nodes=64, days=2.0)
    repairs = ((1.0, given.repair_h * _HOUR_S),) if given.repair_h else ()
    model = FailureModel(mean_lifetime_s=given.mtbf_h * _HOUR_S * given.nodes, batches={1: 1.0}, repairs=repairs)
    trace = generate(model, num_nodes=given.nodes, duration_s=given.days * 24 * _HOUR_S, seed=0)
    profile = estimate_profile(
        model_shape("gpt3-6.7b"),
        device_sheet("A100"),
        microbatch_size=1,
        sequence_length=2048,
        precision="bfloat16",
        recompute="none",
        device_counts=(1,),
    )
    settings = SweepSettings(profile=profile, global_batch_size=4 * given.nodes)
    if given.only_finishing:
        settings = replace(settings, costs=Costs(**dict.fromkeys((part.name for part in fields(Costs)), 0.0)))
    began_s, processor_s = time.perf_counter(), time.process_time()
    summary = summarize(sweep(trace, settings))
    took_s, used_s = time.perf_counter() - began_s, time.process_time() - processor_s
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    events = facts_of(trace).events
    print(f"{given.nodes} nodes, {given.days:g} days, {events}")
    stalls_s = [recovery.stall_s for recovery in summary.recoveries]
    print(f"{summary.steps_committed:,} steps, {len(stalls_s)} recoveries, goodput {summary.goodput:.5f}")
    if stalls_s:
        print(f"a recovery stops training for {statistics.median(stalls_s):.2f} s")
    print(f"{used_s:.2f} s of processor time, {took_s:.2f} s by the clock, {peak_mb:.0f} MB at most")


if __name__ == "__main__":
    main()

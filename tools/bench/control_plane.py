"""What the control plane costs the master: its processor time while hundreds of agents are well, start, and lose one.

    python tools/bench/control_plane.py --agents 256 --seconds 30

The master is `oobleck up` itself, in a process of its own, with the SSH connections it holds; for `none` it is the same
coordinator, master and journal on plain sockets. The agents are real as well (`control_agents.py`): all of them in one
process, with workers that sleep in place of computing. Between them is the SSH server of `--local` in another process
(`embedded`), or OpenSSH's (`openssh`). Counted are user and system time of the master's process alone, while a run goes
on as usual: `heartbeats` where no step ends, `steps` where one is committed every `--step` seconds, which the first and
the last stage of each pipeline tell, and every worker its pace.

Then a node loses its power. `decided` is from the moment it is missed until the orders go out, `done` until all train
again; processor seconds are the master's, from the loss on. And the master is killed, and another one takes over:
`done` is from its start until it speaks to all agents again. The tables are Markdown.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.bench.control_processes import Agents, Cluster, Master, run_master, serve_agents, serve_ssh
from tools.bench.control_servers import why_no_openssh
from tools.smoke import parse_arguments

__all__ = ["main"]

_TUNNELS = ("none", "embedded", "openssh")
_WORK = ("heartbeats", "steps")
_ENDLESS_STEP_S = 3600.0
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What the master does while all is well."""

    share: float
    """Of one processor."""
    memory_mib: float
    heard_per_s: float
    """Messages from agents."""
    said_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A start, or a loss."""

    took_s: float
    decided_s: float
    processor_s: float
    heard: int
    said: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    asked = _parse(arguments)
    usual: list[str] = []
    changes: list[str] = []
    for tunnels in asked.tunnels:
        if tunnels == "openssh" and (reason := why_no_openssh()) is not None:
            print(f"not measured through OpenSSH: {reason}")
            continue
        for work in asked.work:
            cluster = Cluster(
                agents=asked.agents,
                pipelines=asked.pipelines or max(2, asked.agents // 8),
                step_s=_ENDLESS_STEP_S if work == "heartbeats" else asked.step,
                interval_s=asked.interval,
                lease_s=asked.lease or 5 * asked.interval,
                tunnels=tunnels,
                has_dashboard=asked.dashboard,
            )
            measured, happened = _measure(cluster, seconds=asked.seconds, changes=work == "steps")
            usual.append(_usual_row(tunnels, work, measured, asked.agents))
            changes += (_change_row(tunnels, what, change) for what, change in happened.items())
    print(f"{asked.agents} agents, a heartbeat every {asked.interval:g} s, a step every {asked.step:g} s\n")
    print("| tunnels | what happens | of a processor | an agent's share | memory, MiB | heard /s | said /s |")
    print("|---|---|---|---|---|---|---|", *usual, sep="\n")
    print("\n| tunnels | what happens | decided, s | done, s | processor, s | heard | said |")
    print("|---|---|---|---|---|---|---|", *changes, sep="\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the usual is looked at")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between the heartbeats of an agent")
    parser.add_argument("--lease", type=float, help="seconds; by default five intervals")
    parser.add_argument("--step", type=float, default=1.0, help="seconds that a step takes")
    parser.add_argument("--pipelines", type=int, help="by default one for eight agents")
    parser.add_argument("--tunnels", choices=_TUNNELS, nargs="+", default=_TUNNELS)
    parser.add_argument("--work", choices=_WORK, nargs="+", default=_WORK)
    parser.add_argument("--dashboard", action="store_true", help="the master draws its dashboard, on a terminal")
    # With a lease of seconds, a busy machine would lose more nodes than the one that is waited for.
    smallest = {"agents": 4, "seconds": 1.0, "step": 0.5, "lease": 60.0}
    return parse_arguments(parser, arguments, **smallest, tunnels=("none", "embedded"), work=("steps",))


def _usual_row(tunnels: str, work: str, usual: Usual, agents: int) -> str:
    columns = f"{usual.share:.1%} | {usual.share / agents:.4%} | {usual.memory_mib:.0f}"
    return f"| {tunnels} | {work} | {columns} | {usual.heard_per_s:.0f} | {usual.said_per_s:.0f} |"


def _change_row(tunnels: str, what: str, change: Change) -> str:
    decided = "" if math.isnan(change.decided_s) else f"{change.decided_s:.3f}"
    columns = f"{decided} | {change.took_s:.2f} | {change.processor_s:.2f}"
    return f"| {tunnels} | {what} | {columns} | {change.heard} | {change.said} |"


def _measure(cluster: Cluster, *, seconds: float, changes: bool) -> tuple[Usual, dict[str, Change]]:
    """Run a job, look at it for so long, and have it lose a node and then its master."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="obcp")))
        agents = stack.enter_context(serve_agents(cluster, directory))
        reach = stack.enter_context(serve_ssh(cluster, directory))
        began_s = time.monotonic()
        master = stack.enter_context(run_master(cluster, directory, reach))
        master.wait_for("plan in force", lambda: 0 < master.num_training <= agents.counts()["said Resumed"])
        started = _change(master, agents, began_s=began_s, before=Counter(), before_s=0.0)
        time.sleep(min(seconds, _SETTLE_S))
        usual = _look(master, agents, seconds)
        if not changes:
            return usual, {"start": started}
        lost = _lose(master, agents, cluster.agents)
        agents.leave_notes(cluster, directory)
        master.kill()
        before, began_s = agents.counts(), time.monotonic()
        heir = stack.enter_context(run_master(cluster, directory, reach, takes_over=True))
        num_agents = cluster.agents - 1
        heir.wait_for("takeover", lambda: (agents.counts() - before)["said Hello"] >= num_agents)
        taken = _change(heir, agents, began_s=began_s, before=before, before_s=0.0)
        given_up = len(heir.entries("NodeLost"))
        if given_up > 1:
            raise RuntimeError(f"a takeover lost {given_up - 1} nodes")
        return usual, {"start": started, "loss": lost, "takeover": taken}


def _look(master: Master, agents: Agents, seconds: float) -> Usual:
    before, before_s, began_s = agents.counts(), master.processor_s, time.monotonic()
    time.sleep(seconds)
    after, after_s, took_s = agents.counts(), master.processor_s, time.monotonic() - began_s
    return Usual(
        share=(after_s - before_s) / took_s,
        memory_mib=master.memory_mib,
        heard_per_s=_number(after - before, "said") / took_s,
        said_per_s=_number(after - before, "heard") / took_s,
    )


def _lose(master: Master, agents: Agents, num_agents: int) -> Change:
    before, before_s, began_s = agents.counts(), master.processor_s, time.monotonic()
    agents.lose(f"node{num_agents // 2}")
    master.wait_for("recovery", lambda: bool(master.entries("RecoveryDone")))
    (entry, *_) = master.entries("RecoveryDone")
    return _change(
        master, agents, began_s=began_s, before=before, before_s=before_s, decided_s=float(str(entry["decide_s"]))
    )


def _change(
    master: Master,
    agents: Agents,
    *,
    began_s: float,
    before: Counter[str],
    before_s: float,
    decided_s: float = math.nan,
) -> Change:
    took_s = time.monotonic() - began_s
    happened = agents.counts() - before
    return Change(
        took_s=took_s,
        decided_s=decided_s,
        processor_s=master.processor_s - before_s,
        heard=_number(happened, "said"),
        said=_number(happened, "heard"),
    )


def _number(counts: Counter[str], verb: str) -> int:
    """Messages, from the agents' side."""
    return sum(number for what, number in counts.items() if what.startswith(f"{verb} "))


if __name__ == "__main__":
    main()

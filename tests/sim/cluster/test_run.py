"""Whole runs on virtual nodes: the real master, agents and coordinator, one kind of fault at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.control.journal import (
    Action,
    ForkServerDown,
    JournalEntry,
    LossCause,
    MasterResumed,
    NodeConnected,
    NodeLeft,
    NodeLost,
    PlanAdopted,
    PlanCause,
    ProfileKnown,
    RecoveryDone,
    StepDone,
    WorkerDown,
)
from oobleck.control.protocol import Killed
from oobleck.control.steps import hops_up
from oobleck.errors import ExitCode
from oobleck.job import ScheduleName
from oobleck.planner import profile_from_json
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.sim.cluster.run import ClusterRun
from oobleck.sim.trace import (
    AgentCrashed,
    ForkServerCrashed,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    TraceEvent,
    WorkerCrashed,
)
from tests.sim.digests import digests
from tests.sim.virtual import STARTED_S, Setting

LEASE_S = Setting().job.control.lease_s


def run(*events: TraceEvent, **fields) -> ClusterRun:
    return Setting(events=events, **fields).run()


def entries(played: ClusterRun, kind: type, *, since_s: float = 0.0) -> list[JournalEntry]:
    return [entry for entry in played.entries if isinstance(entry, kind) and entry.t_s >= since_s]


def steps(played: ClusterRun) -> list[int]:
    return [entry.record.step for entry in entries(played, StepDone)]


def check_whole(played: ClusterRun) -> None:
    """The run ended well, and every step was committed once, in turn."""
    assert played.end.exit_code == 0, played.end.reason
    assert steps(played) == list(range(1, len(steps(played)) + 1))
    assert len(steps(played)) > 50


def test_links_are_timed_before_the_first_plan_and_the_run_is_as_with_the_network_that_is_there():
    setting = Setting(assumes_network=True, devices=2)
    played = setting.run()
    check_whole(played)
    (known,) = entries(played, ProfileKnown)
    network = profile_from_json(known.profile_json).network
    assert network.assumed == ()
    assert network.inter_node_bytes_per_s == pytest.approx(setting.profile.network.inter_node_bytes_per_s)
    assert network.intra_node_latency_s == pytest.approx(setting.profile.network.intra_node_latency_s)
    (first, *_) = entries(played, PlanAdopted)
    assert known.t_s <= first.t_s < 5.0


def test_an_undisturbed_run_trains_at_the_pace_that_was_predicted():
    played = run()
    check_whole(played)
    (plan,) = entries(played, PlanAdopted)
    assert STARTED_S - 1 < plan.t_s < STARTED_S
    assert played.summary.step_time_s.median == pytest.approx(plan.predicted_step_s, rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "auto"])
def test_steps_take_what_the_timeline_of_the_schedule_says(schedule: ScheduleName):
    setting = Setting(layers_per_device=2, schedule=schedule, slowness=5.0, duration_s=200.0)
    played = setting.run()
    (plan,) = entries(played, PlanAdopted)
    kind = None if schedule == "auto" else ScheduleKind(schedule)
    assert set(plan.schedules) == {ScheduleKind.ZERO_BUBBLE if kind is None else kind}
    commit_s = 2 * hops_up(plan.plan.worker_ids) * setting.profile.network.inter_node_latency_s
    expected_s = forecast(setting.profile, plan.plan, kind=kind).step_s
    _, *later = [entry.record.duration_s for entry in entries(played, StepDone)]
    assert len(later) > 50
    assert later == pytest.approx([expected_s + commit_s / 2] * len(later), rel=1e-9, abs=commit_s / 2)


def test_a_lost_node_costs_no_step():
    played = run(Lost(t_s=10.0, node="n2"))
    check_whole(played)
    (lost,) = entries(played, NodeLost)
    assert (lost.node, lost.loss.cause) == ("n2", LossCause.CONNECTION_LOST)
    (recovery,) = entries(played, RecoveryDone)
    assert recovery.steps_lost == 0
    assert recovery.decide_s < 0.1


def test_a_node_that_comes_again_is_taken_in():
    played = run(Lost(t_s=10.0, node="n2"), Joined(t_s=15.0, node="n2"))
    check_whole(played)
    assert [entry.why for entry in entries(played, RecoveryDone)] == [LossCause.CONNECTION_LOST, PlanCause.JOINED]
    assert "n2" in entries(played, PlanAdopted)[-1].plan.nodes


def test_a_node_frozen_for_less_than_its_lease_only_delays_everybody():
    played = run(Frozen(t_s=10.0, node="n1"), Thawed(t_s=10.0 + LEASE_S / 2, node="n1"))
    check_whole(played)
    assert entries(played, NodeLost) == []
    longest_s = max(entry.record.duration_s for entry in entries(played, StepDone, since_s=9.0))
    step_s = played.summary.step_time_s.median
    assert LEASE_S / 2 <= longest_s <= LEASE_S / 2 + 2 * step_s


def test_a_node_frozen_for_good_costs_its_lease():
    played = run(Frozen(t_s=10.0, node="n1"))
    check_whole(played)
    (lost,) = entries(played, NodeLost)
    assert lost.loss.cause is LossCause.LEASE_EXPIRED
    assert lost.t_s == pytest.approx(10.0 + LEASE_S, abs=Setting().job.control.heartbeat_interval_s)
    (recovery,) = entries(played, RecoveryDone)
    assert recovery.stall_s <= LEASE_S + 0.5


def test_a_node_that_thaws_after_it_was_given_up_harms_nobody():
    played = run(Frozen(t_s=10.0, node="n1"), Thawed(t_s=20.0, node="n1"), duration_s=120.0)
    check_whole(played)


def test_a_crashed_worker_is_started_again_in_its_place():
    played = run(WorkerCrashed(t_s=10.0, node="n3"))
    check_whole(played)
    assert len(entries(played, WorkerDown)) == 1
    assert entries(played, NodeLost) == []
    assert entries(played, RecoveryDone)[-1].action is Action.RESTART_WORKER


def test_a_crashed_agent_takes_its_node_with_it():
    played = run(AgentCrashed(t_s=10.0, node="n3"))
    check_whole(played)
    assert [entry.node for entry in entries(played, NodeLost)] == ["n3"]


def test_a_noticed_node_leaves_before_it_is_lost():
    played = run(Noticed(t_s=10.0, node="n0", grace_s=30.0), Lost(t_s=40.0, node="n0"))
    check_whole(played)
    (left,) = entries(played, NodeLeft)
    assert left.t_s < 11.0
    assert entries(played, NodeLost) == []


def test_a_run_whose_nodes_all_have_notice_saves_and_ends_before_they_are_gone():
    notices = [Noticed(t_s=10.0 + index / 100, node=f"n{index}", grace_s=30.0) for index in range(4)]
    played = run(*notices, duration_s=60.0)
    assert played.end.exit_code == ExitCode.RESUMABLE
    assert played.entries[-1].t_s < 20.0, "it did not wait for the losses"
    assert entries(played, NodeLost) == []
    newest = entries(played, StepDone)[-1].record.step
    assert played.end.reason.endswith(f"{newest} steps are committed")


def test_a_node_cut_off_is_lost_and_may_come_back():
    played = run(Partitioned(t_s=10.0, nodes=("n1",)), Healed(t_s=20.0), duration_s=60.0)
    check_whole(played)
    assert [entry.node for entry in entries(played, NodeLost)][:1] == ["n1"]


def test_a_slow_node_slows_everybody_from_its_next_program_on():
    played = run(Slowed(t_s=10.0, node="n1", factor=3.0), Slowed(t_s=14.0, node="n1", factor=1.0))
    check_whole(played)
    assert entries(played, RecoveryDone) == []  # so short a slow-down is not planned for
    usual_s = played.summary.step_time_s.median
    slow = [step for step in entries(played, StepDone) if 12.0 < step.t_s < 14.0]
    assert slow[0].record.duration_s == pytest.approx(3 * usual_s, rel=0.1)
    assert entries(played, StepDone)[-1].record.duration_s == pytest.approx(usual_s, rel=0.1)


def test_a_profile_that_is_not_cached_is_measured():
    assert Setting(has_profile=False).run().end.exit_code == 0


@pytest.mark.parametrize("loss_s", [0.2, 0.421, 2.0, 3.9])
def test_a_node_lost_before_training_is_named(loss_s: float):
    played = run(Lost(t_s=loss_s, node="n1"))
    assert played.end.exit_code != 0
    assert "n1" in played.end.reason


def test_several_devices_a_node():
    check_whole(run(Lost(t_s=10.0, node="n1"), num_nodes=3, devices=2))


EVENTS = """(
    Lost(t_s=10.0, node="n2"),
    WorkerCrashed(t_s=10.0, node="n0"),
    Frozen(t_s=20.0, node="n3"),
    Joined(t_s=21.0, node="n2"),
    Thawed(t_s=22.0, node="n3"),
)"""

DIGEST = f"""
from oobleck.sim.trace import *
from tests.sim.virtual import Setting
print(Setting(events={EVENTS}).run(seed=5).digest)
"""


def test_the_same_trace_and_seed_give_the_same_journal_in_another_process():
    def digest(hash_seed: str) -> bytes:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        root = Path(__file__).parents[3]
        return subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, check=True, capture_output=True, cwd=root
        ).stdout.strip()

    played = Setting(events=eval(EVENTS)).run(seed=5)
    assert {digest("0"), digest("1")} == {played.digest.encode()}
    assert Setting(events=eval(EVENTS)).run(seed=6).digest != played.digest


def other_python() -> str:
    """A Python of another version that can run this project. Skips the test where there is none."""
    named = os.environ.get("OOBLECK_OTHER_PYTHON")
    if named is not None:
        return named
    mine = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("python3.11", "python3.12", "python3.13"):
        found = shutil.which(name)
        if name != mine and found is not None and elsewhere(found, "-c", "import tests.sim.digests").returncode == 0:
            return found
    pytest.skip("no other Python here has Oobleck's dependencies: name one's executable in OOBLECK_OTHER_PYTHON")


def elsewhere(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, *arguments],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_the_same_traces_and_seeds_give_the_same_journals_under_another_version_of_python():
    played = elsewhere(other_python(), "-m", "tests.sim.digests")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout) == digests()


def test_a_node_that_nobody_knows_is_unreachable_and_no_more():
    played = run(Joined(t_s=10.0, node="n9"), nodes_away=("n9",))
    check_whole(played)
    assert [entry.node for entry in entries(played, NodeConnected, since_s=5.0)] == ["n9"]


@pytest.mark.parametrize("crash_s", [1.0, 5.0, 10.004, 10.012, 10.1])
def test_a_crashed_master_is_replaced_and_training_goes_on(crash_s: float):
    loss = (Lost(t_s=10.0, node="n2"),) if crash_s > 10 else ()
    played = run(*loss, MasterCrashed(t_s=crash_s, down_s=1.0))
    check_whole(played)
    resumed = entries(played, MasterResumed)
    assert len(resumed) == (crash_s > STARTED_S)


def test_workers_that_end_all_at_once_are_waited_for_and_begin_again():
    played = run(*(WorkerCrashed(t_s=10.0, node=f"n{number}") for number in range(4)))
    assert played.end.exit_code == 0, played.end.reason
    assert entries(played, NodeLost) == []
    plan = entries(played, PlanAdopted)[-1]
    assert (plan.action, plan.restored_step) == (Action.BEGIN_AGAIN, 0)
    before = len(entries(played, StepDone)) - len(entries(played, StepDone, since_s=10.0))
    assert played.summary.steps_lost == before > 0
    assert steps(played)[before:] == list(range(1, played.summary.steps_committed + 1))


def test_the_end_of_a_fork_server_stops_nobody_and_the_next_worker_waits_for_another():
    crash = WorkerCrashed(t_s=11.0, node="n3")
    played = run(ForkServerCrashed(t_s=10.0, node="n3"), crash)
    check_whole(played)
    (down,) = entries(played, ForkServerDown)
    assert (down.node, down.end, down.is_restarted) == ("n3", Killed(signal=9), True)
    back_s = entries(played, RecoveryDone)[-1].t_s
    assert back_s - entries(run(crash), RecoveryDone)[-1].t_s > 1.0

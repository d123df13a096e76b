from __future__ import annotations

import json
from itertools import takewhile

import pytest

from oobleck.control.journal import (
    Action,
    ConnectionLost,
    GenerationCause,
    GenerationEnded,
    JobEnded,
    LossCause,
    NodeAdded,
    NodeConnected,
    NodeLost,
    Notice,
    PlanCause,
    RecoveryStarted,
    Silent,
    WorkerUp,
)
from oobleck.control.journal.snapshot import NodeState, RunSnapshot, RunState, WorkState
from oobleck.control.journal.summary import summarize
from oobleck.control.journal.view import RunView
from oobleck.control.protocol import NodeUse
from oobleck.job import NodeSpec
from tests.control.journals import (
    adopted,
    committed,
    job_started,
    plan,
    recovered,
    run_with_a_loss,
    script_with_a_failure,
)

NODES = ("node0", "node1", "node2", "node3")
TWO = plan(("node0", "node1"), ("node2", "node3"))
START = (job_started(NODES), adopted(1.0, 1, TWO), committed(2.0, 1), committed(3.0, 2))
LOST = NodeLost(t_s=3.1, node="node3", loss=ConnectionLost())
RECOVERING = RecoveryStarted(
    t_s=3.1, generation=2, nodes=("node3",), cause=PlanCause.LOSS, loss=LossCause.CONNECTION_LOST
)


def seen(*entries, now_s: float = 3.2) -> RunSnapshot:
    view = RunView()
    for entry in entries:
        view.apply(entry)
    return view.at(now_s)


def stage_states(snapshot: RunSnapshot) -> list[list[WorkState]]:
    return [[stage.state for stage in pipeline.stages] for pipeline in snapshot.pipelines]


def node_states(snapshot: RunSnapshot) -> list[NodeState]:
    return [node.state for node in snapshot.nodes]


def test_an_empty_view_can_be_shown():
    snapshot = RunView().at(1.5)
    assert (snapshot.state, snapshot.elapsed_s, snapshot.pipelines) == (RunState.STARTING, 1.5, ())


def test_nodes_are_followed_from_connecting_to_training():
    entries = [
        job_started(NODES),
        NodeConnected(t_s=0.5, node="node1", agent_pid=1),
        WorkerUp(t_s=0.9, node="node2", device=0, pid=2, data_digest="d"),
    ]
    assert node_states(seen(*entries)) == [
        NodeState.CONNECTING, NodeState.CONNECTED, NodeState.READY, NodeState.CONNECTING
    ]  # fmt: skip
    assert node_states(seen(*entries, adopted(1.0, 1, TWO))) == [NodeState.TRAINING] * 4


def test_training_shows_the_newest_step_and_recent_speed():
    snapshot = seen(*START)
    assert (snapshot.state, snapshot.step, snapshot.max_steps) == (RunState.TRAINING, 2, 120)
    assert snapshot.loss == 8.0 / (1 + 2 / 50)
    assert snapshot.tokens_per_s == 4096
    assert snapshot.remaining_s == 118 * 0.5


def test_speed_is_the_median_of_recent_steps():
    slow = committed(13.0, 3, duration_s=10.0)
    assert seen(*START, slow, now_s=13.0).step_time_s == 0.5


def test_a_step_that_took_no_time_has_no_speed():
    snapshot = seen(START[0], committed(1.0, 1, duration_s=0.0))
    assert (snapshot.step, snapshot.tokens_per_s, snapshot.remaining_s) == (1, None, None)


def test_a_late_commit_of_the_old_generation_does_not_end_the_change():
    after = adopted(3.2, 2, plan(("node0", "node1"), ("node2",)), Action.REINSTANTIATE)
    snapshot = seen(*START, LOST, RECOVERING, after, committed(3.3, 3, 1))
    assert stage_states(snapshot)[1] == [WorkState.RECONFIGURING]


def test_the_view_knows_when_the_journal_has_ended():
    view = RunView()
    view.apply(START[0])
    assert not view.has_ended
    view.apply(JobEnded(t_s=3.5, exit_code=0, reason="done"))
    assert view.has_ended


def test_before_the_first_step_stages_are_starting():
    assert stage_states(seen(*START[:2])) == [[WorkState.STARTING] * 2] * 2


def test_a_loss_breaks_its_pipeline_and_leaves_the_others_training():
    snapshot = seen(*START, LOST, RECOVERING)
    assert snapshot.state is RunState.RECONFIGURING
    assert stage_states(snapshot) == [
        [WorkState.TRAINING, WorkState.TRAINING],
        [WorkState.RECONFIGURING, WorkState.LOST],
    ]
    assert node_states(snapshot)[3] is NodeState.LOST


def test_a_new_plan_reconfigures_only_the_stages_that_changed_until_a_step_is_committed():
    after = plan(("node0", "node1"), ("node2",))
    new = adopted(3.2, 2, after, Action.REINSTANTIATE, redundant=True)
    during = seen(*START, LOST, RECOVERING, new)
    assert stage_states(during) == [[WorkState.TRAINING] * 2, [WorkState.RECONFIGURING]]
    done = seen(*START, LOST, RECOVERING, new, committed(3.4, 3, 2), recovered(3.4, 2, "node3"))
    assert stage_states(done) == [[WorkState.TRAINING] * 2, [WorkState.TRAINING]]
    assert (done.state, done.num_recoveries, done.generation) == (RunState.TRAINING, 1, 2)


def test_survivors_without_a_place_are_ready_and_spares_are_spare():
    spared = adopted(3.2, 2, plan(("node0", "node1"), spares=("node2",)))
    assert node_states(seen(*START, LOST, spared)) == [
        NodeState.TRAINING, NodeState.TRAINING, NodeState.SPARE, NodeState.LOST
    ]  # fmt: skip
    dropped = adopted(3.2, 2, plan(("node0", "node1")))
    assert node_states(seen(*START, dropped))[2:] == [NodeState.READY] * 2


def test_a_lost_node_that_connects_again_is_no_longer_lost():
    again = NodeConnected(t_s=9.0, node="node3", agent_pid=5)
    assert node_states(seen(*START, LOST, again))[3] is NodeState.CONNECTED


def test_a_node_that_joins_is_added():
    joined = NodeConnected(t_s=9.0, node="node9", agent_pid=5)
    assert [node.name for node in seen(*START, joined).nodes] == [*NODES, "node9"]


def test_a_node_shows_what_has_given_it_last():
    first, again = (
        NodeSpec(name="node9", host="node9", origin=origin) for origin in ("pod x", "pod x on another machine")
    )
    nodes = seen(*START, NodeAdded(t_s=9.0, node=first), NodeAdded(t_s=19.0, node=again)).nodes
    assert {node.name: node.origin for node in nodes} == {**dict.fromkeys(NODES, ""), "node9": again.origin}


def test_a_plan_without_pipelines_is_waiting():
    assert seen(*START, adopted(3.2, 2, plan(), redundant=False)).state is RunState.WAITING


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [(0, RunState.STOPPED), (1, RunState.FAILED), (75, RunState.STOPPED), (130, RunState.STOPPED)],
)
def test_the_end_is_kept_and_stops_the_clock(exit_code, state):
    snapshot = seen(*START, JobEnded(t_s=3.5, exit_code=exit_code, reason="ended"), now_s=99.0)
    assert (snapshot.state, snapshot.elapsed_s, snapshot.exit_code) == (state, 3.5, exit_code)
    assert snapshot.remaining_s is None
    assert stage_states(snapshot) == [[WorkState.ENDED] * 2] * 2


def test_a_run_is_done_once_all_its_steps_are_and_stopped_before():
    last = committed(3.4, seen(*START).max_steps)
    ended = JobEnded(t_s=3.5, exit_code=0, reason="stopped on request")
    assert seen(*START, last, ended).state is RunState.DONE
    assert seen(*START, committed(3.4, 7), ended).state is RunState.STOPPED


def test_nodes_that_join_are_no_recovery_of_anything():
    joined = recovered(3.4, 2, "node3", cause=PlanCause.JOINED)
    slow = recovered(3.4, 2, "node3", cause=PlanCause.SLOW)
    assert seen(*START, joined).num_recoveries == 0
    assert seen(*START, joined, slow, recovered(3.5, 3, "node2")).num_recoveries == 2


@pytest.mark.parametrize(
    ("cause", "state"), [(GenerationCause.FINISHED, RunState.DONE), (GenerationCause.STOPPED, RunState.STOPPED)]
)
def test_a_script_that_was_stopped_is_not_done(cause, state):
    over = GenerationEnded(t_s=50.0, generation=2, cause=cause)
    ended = JobEnded(t_s=51.0, exit_code=0, reason="ended")
    snapshot = seen(*script_with_a_failure(), over, ended)
    assert (snapshot.state, snapshot.num_recoveries, snapshot.generation) == (state, 1, 2)


def test_heartbeats_are_noted_without_a_journal_entry():
    view = RunView()
    view.apply(START[0])
    view.heard("node1", 2.0)
    assert [node.heard_s_ago for node in view.at(2.75).nodes] == [None, 0.75, None, None]


def test_events_are_plain_words_with_time_and_level_and_steps_are_not_among_them():
    snapshot = seen(*START, LOST, Notice(t_s=3.2, level="error", text="disk full"))
    assert [(event.t_s, event.level) for event in snapshot.events] == [
        (0.0, "info"), (1.0, "info"), (3.1, "warning"), (3.2, "error")
    ]  # fmt: skip
    assert snapshot.events[-2].text == LOST.sentence


def test_lost_redundancy_is_a_warning():
    assert adopted(1.0, 2, TWO, redundant=False).level == "warning"
    assert JobEnded(t_s=1.0, exit_code=1, reason="failed").level == "error"


def test_live_goodput_is_that_of_the_summary():
    entries = list(run_with_a_loss())
    for t_s in (3.0, 20.0, 26.0, 65.9):
        until = list(takewhile(lambda entry, t_s=t_s: entry.t_s <= t_s, entries))
        assert seen(*until, now_s=until[-1].t_s).goodput == summarize(until).goodput


def test_a_snapshot_is_json():
    written = json.loads(json.dumps(seen(*START).to_dict()))
    assert written["state"] == "training"
    assert written["pipelines"][1]["stages"][1] == {
        "node": "node3", "first_layer": 4, "stop_layer": 8, "more_chunks": [], "num_devices": 1, "state": "training"
    }  # fmt: skip


def test_a_regrouping_that_lost_no_node_is_told_as_that():
    regrouping = RecoveryStarted(t_s=3.1, generation=2, nodes=(), cause=PlanCause.PEER_FAILED)
    texts = [event.text for event in seen(*START, regrouping, recovered(3.4, 2)).events]
    assert texts[-2] == regrouping.sentence
    assert texts[-1].startswith("regrouped; new pipelines; ")


def test_nodes_show_their_kinds_where_there_are_several():
    assert {node.kind for node in seen(*START).nodes} == {""}
    other = NodeAdded(t_s=9.0, node=NodeSpec(name="node9", host="node9", devices=(0, 1), device="A40"))
    assert {node.name: node.kind for node in seen(*START, other).nodes} == {
        **dict.fromkeys(NODES, "default"),
        "node9": "A40×2",
    }


def test_the_course_of_loss_and_speed_covers_the_whole_run_in_few_points():
    view = RunView()
    view.apply(job_started(("node0",)))
    for step in range(1, 5001):
        view.apply(committed(float(step), step, loss=float(step)))
    snapshot = view.at(5000.0)
    assert 128 <= len(snapshot.losses) == len(snapshot.speeds) <= 256
    assert list(snapshot.losses) == sorted(snapshot.losses)
    assert snapshot.losses[0] < 40
    assert snapshot.losses[-1] > 4900


def test_what_a_node_uses_is_known_until_it_is_old_or_the_node_is_lost():
    view = RunView()
    view.apply(job_started(("node0", "node1")))
    use = NodeUse(cores=1.5, num_cores=4, used_bytes=1, memory_bytes=2)
    view.measured("node0", use, 5.0)
    view.measured("node1", use, 5.0)
    assert [node.use and node.use.cores for node in view.at(14.0).nodes] == [1.5, 1.5]
    view.apply(NodeLost(t_s=14.5, node="node1", loss=Silent(silent_s=3.0)))
    assert [node.use is None for node in view.at(14.5).nodes] == [False, True]
    assert [node.use is None for node in view.at(16.0).nodes] == [True, True]

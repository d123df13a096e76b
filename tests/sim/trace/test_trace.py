from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oobleck.errors import ConfigError
from oobleck.sim.trace import (
    Joined,
    Lost,
    Slowed,
    Trace,
    trace_from_json,
    trace_to_json,
    with_kinds,
    with_nodes,
    with_spares,
)
from tests.sim.strategies import traces

DESIGNED = """
{"version": 1, "duration_s": 3600, "nodes": ["node0", "node1", "node2", "node3"],
 "start": ["node0", "node1", "node2", "node3"],
 "events": [{"t_s": 600, "kind": "node_lost", "node": "node2"},
            {"t_s": 900, "kind": "node_slow", "node": "node1", "factor": 1.5},
            {"t_s": 1200, "kind": "node_joined", "node": "node2"}]}
"""


def changed(change: Callable[[Any], object]) -> str:
    document = json.loads(DESIGNED)
    change(document)
    return json.dumps(document)


def with_events(*events: object) -> str:
    return changed(lambda document: document.update(events=list(events)))


def event(kind: str, t_s: float = 1, **rest: object) -> dict[str, object]:
    return {"t_s": t_s, "kind": kind, **rest}


def test_the_documented_file_is_read() -> None:
    names = ("node0", "node1", "node2", "node3")
    assert trace_from_json(DESIGNED) == Trace(
        duration_s=3600,
        nodes=names,
        start=names,
        events=(
            Lost(t_s=600, node="node2"),
            Slowed(t_s=900, node="node1", factor=1.5),
            Joined(t_s=1200, node="node2"),
        ),
    )


def test_all_nodes_are_there_at_first_where_the_file_does_not_say() -> None:
    trace = trace_from_json(changed(lambda document: document.pop("start")))
    assert trace.start == trace.nodes


def test_counts_follow_losses_and_joins_and_merge_what_comes_together() -> None:
    trace = trace_from_json(
        with_events(
            event("node_lost", 1, node="node0"),
            event("agent_crashed", 1, node="node1"),
            event("node_slow", 2, node="node2", factor=2),
            event("node_joined", 3, node="node0"),
        )
    )
    assert trace.counts == ((0, 4), (1, 2), (3, 3))


@given(trace=traces())
def test_the_text_form_and_its_inverse(trace: Trace) -> None:
    assert trace_from_json(trace_to_json(trace)) == trace


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", r"my\.json: not JSON"),
        ("[" * 100_000, r"my\.json: not JSON: it is nested too deeply"),
        (DESIGNED.replace('"version": 1', '"version": 1, "version": 2'), r"my\.json: not JSON: a map has a key twice"),
        ("[]", "the file must be an object, not list"),
        (changed(lambda d: d.update(evnets=[])), "unknown key 'evnets'; did you mean 'events'"),
        (changed(lambda d: d.pop("nodes")), "nodes is missing"),
        (changed(lambda d: d.update(version=2)), "trace version 2 is not known; this program reads 1"),
        (changed(lambda d: d.update(duration_s=0)), r"duration_s is 0\.0; .* from 0\.001"),
        (changed(lambda d: d.update(duration_s=float("nan"))), "not JSON: NaN is not a number"),
        (changed(lambda d: d.update(duration_s=10**400)), "duration_s is inf"),
        (changed(lambda d: d.update(nodes="node0")), "nodes must be a list, not str"),
        (changed(lambda d: d.update(nodes=["node0", 1])), "nodes holds 1; it must be text"),
        (changed(lambda d: d["nodes"].append("node0")), "nodes names 'node0' twice"),
        (changed(lambda d: d["nodes"].append("")), "nodes holds an empty name"),
        (changed(lambda d: d["start"].append("node0")), "start names 'node0' twice"),
        (changed(lambda d: d["start"].append("node9")), "start names 'node9', which is not among the trace's nodes"),
        (with_events(1), "event 0 1 must be an object, not int"),
        (with_events({"t_s": 1}), "event 0 .*: kind is None; it must be one of node_lost, node_joined"),
        (with_events(event("node_lsot", node="node0")), "event 0 .*: kind is 'node_lsot'; it must be one of node_lost"),
        (with_events(event("node_lost")), "event 0 .*: node is missing"),
        (with_events(event("node_lost", node=3)), "event 0 .*: node is 3; it must be text"),
        (with_events(event("node_lost", node="node0", factor=2)), "event 0 .*: unknown key 'factor'"),
        (with_events(event("node_lost", node="node9")), "event 0 .*: 'node9' is not among the trace's nodes"),
        (with_events(event("node_lost", -1, node="node0")), "event 0 .*: t_s is -1.0"),
        (with_events(event("node_lost", float("inf"), node="node0")), "not JSON: Infinity is not a number"),
        (with_events(event("node_lost", 3601, node="node0")), "event 0 .*: the trace ends at 3600 s"),
        (
            with_events(event("node_lost", 5, node="node0"), event("node_lost", 4, node="node1")),
            'event 1 {"t_s": 4.0, "kind": "node_lost", "node": "node1"}: time goes backwards: .* at 5 s',
        ),
        (with_events(event("node_joined", node="node0")), "event 0 .*: node0 is there already"),
        (
            with_events(event("node_lost", node="node0"), event("node_lost", node="node0")),
            "event 1 .*: node0 is not there",
        ),
        (
            with_events(event("agent_crashed", node="node0"), event("worker_crashed", node="node0")),
            "event 1 .*: node0 is not there",
        ),
        (with_events(event("node_thawed", node="node0")), "event 0 .*: node0 is not frozen"),
        (
            with_events(event("node_frozen", node="node0"), event("node_frozen", node="node0")),
            "event 1 .*: node0 is frozen",
        ),
        (with_events(event("node_slow", node="node0", factor=0.5)), "event 0 .*: factor is 0.5; .* from 1, the usual"),
        (with_events(event("node_slow", node="node0", factor=float("nan"))), "not JSON: NaN is not a number"),
        (with_events(event("worker_crashed", node="node0", device=-1)), "event 0 .*: device is -1"),
        (with_events(event("worker_crashed", node="node0", device=True)), "device is True; it must be a whole number"),
        (with_events(event("master_crashed", down_s=-1)), "event 0 .*: down_s is -1.0"),
        (with_events(event("notice", node="node0", grace_s=-1)), "event 0 .*: grace_s is -1.0"),
        (with_events(event("partition", nodes=[])), "event 0 .*: nodes is \\[\\]; it must name at least 1 node"),
        (with_events(event("partition", nodes=["node0", "node9"])), "event 0 .*: 'node9' is not among"),
        (with_events(event("heal")), "event 0 .*: there is no partition"),
        (
            with_events(event("partition", nodes=["node0"]), event("heal"), event("heal")),
            "event 2 .*: there is no partition",
        ),
    ],
)
def test_a_bad_file_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"my.json: .*{message}" if "my" not in message else message):
        trace_from_json(text, source="my.json")


def test_a_node_that_was_lost_while_frozen_comes_back_thawed() -> None:
    trace_from_json(
        with_events(
            event("node_frozen", 1, node="node0"),
            event("node_lost", 2, node="node0"),
            event("node_joined", 3, node="node0"),
            event("node_frozen", 4, node="node0"),
        )
    )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["node0", "node1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_KEYS = ("t_s", "kind", "node", "nodes", "factor", "device", "down_s", "grace_s", "version", "duration_s", "start")


def read_or_refuse(text: str) -> Trace | None:
    """A trace, or None with an error that names the file; any other exception is the test's failure."""
    try:
        return trace_from_json(text, source="my.json")
    except ConfigError as error:
        if not str(error).startswith("my.json: "):
            raise
    return None


@given(text=st.text() | _VALUES.map(json.dumps))
@example(text="{}")
def test_any_text_is_a_trace_or_an_error_of_ours(text: str) -> None:
    read_or_refuse(text)


@given(data=st.data(), trace=traces(max_events=4))
def test_a_damaged_file_is_a_trace_or_an_error_of_ours(data: st.DataObject, trace: Trace) -> None:
    document = json.loads(trace_to_json(trace))
    worker_id = data.draw(st.sampled_from([document, *document["events"]]))
    key = data.draw(st.sampled_from(_KEYS) | st.sampled_from(sorted(worker_id)))
    worker_id[key] = data.draw(_VALUES | st.sampled_from(["node_lost", "node_joined", "heal", "partition"]))
    read = read_or_refuse(json.dumps(document))
    assert read is None or trace_from_json(trace_to_json(read)) == read


def test_nodes_may_be_of_kinds() -> None:
    kinds = {"A100": ["node0", "node3"], "A40": ["node1", "node2"]}
    trace = trace_from_json(changed(lambda document: document.update(kinds=kinds)))
    assert trace.kinds == {"node0": "A100", "node3": "A100", "node1": "A40", "node2": "A40"}
    assert trace_from_json(trace_to_json(trace)) == trace
    smaller = with_nodes(trace, 2)
    assert smaller.kinds == {"node0": "A100", "node1": "A40"}
    assert with_kinds(trace, ["x"] * 5).kinds == dict.fromkeys([*trace.nodes, "healthy0"], "x")
    spared = with_spares(trace, 3, activation_s=1.0)
    assert [spared.kinds[f"spare{number}"] for number in range(3)] == ["A100", "A40", "A100"]
    with pytest.raises(ConfigError, match="say of which kinds 5 are"):
        with_nodes(trace, 5)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"A100": ["node0"]}, "node 'node1' is of no kind; name that of each node, or none"),
        ({"A100": ["node9"]}, "kinds names 'node9', which is not among the trace's nodes"),
        ({"A100": ["node0"], "A40": ["node0"]}, "kinds: 'node0' is of A100 and of A40; name it once"),
        ({"9": ["node0"]}, "'9' is not a name of a kind of devices"),
    ],
)
def test_kinds_that_cannot_be_are_refused(kinds: dict[str, list[str]], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace_from_json(changed(lambda document: document.update(kinds=kinds)))
    assert words in str(caught.value)

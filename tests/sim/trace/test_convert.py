from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import ConfigError
from oobleck.sim.trace import Joined, Lost, Trace
from oobleck.sim.trace.convert import FORMATS, convert, detect_format
from oobleck.sim.trace.facts import facts_of

OOBLECK = "5000,add,a\n5000,add,b\n65000,remove,a\n125000,add,c\n"
BAMBOO = "0,3\n60,3\n60,1\n90,1\n90,2\n"
PARCAE = """\
[1000, "add", {"nodes": ["a", "b"]}]
[2000, "no-op", {"duration": 500}]
[4000, "remove", {"nodes": ["a"], "duration": 3}]
[9000, "no-op", {}]
"""
SKYPILOT = '{"metadata": {"gap_seconds": 600, "region": "x"}, "data": [2, 2, 1, 3]}'
INFINITEHBD = json.dumps(
    [
        {"node_id": node, "event_time": days, "event_type": kind, "fault_type": {"Level": "Hardware Failure"}}
        for days, node, kind in (
            (1.0, "x", "fault_start"),
            (1.25, "x", "fault_start"),
            (1.5, "x", "fault_end"),
            (2.0, "x", "fault_end"),
            (3.0, "y", "fault_start"),
        )
    ]
)
LANL = """\
System,nodenumz,Prob Started,Prob Fixed,Hardware
20,7,06/01/2003 10:00,06/01/2003 12:00,CPU
20,9,06/01/2003 11:00,06/01/2003 11:30,
20,7,06/02/2003 10:00,,DRAM
"""
ALL = {
    "oobleck": OOBLECK,
    "bamboo": BAMBOO,
    "parcae": PARCAE,
    "skypilot": SKYPILOT,
    "infinitehbd": INFINITEHBD,
    "lanl": LANL,
}
DATA = Path(__file__).parents[4] / "shared" / "data" / "traces"


def read(format_name: str, text: str | None = None, **options: Any) -> Trace:
    return convert(ALL[format_name] if text is None else text, format_name=format_name, name="file", **options)


@pytest.mark.parametrize("format_name", sorted(FORMATS))
def test_a_format_is_recognised(format_name: str) -> None:
    assert detect_format(ALL[format_name]) == format_name


def test_other_text_is_not_recognised() -> None:
    assert detect_format("hello, world\n") is None
    assert detect_format("") is None


def test_named_nodes_come_and_go() -> None:
    trace = read("oobleck")
    assert (trace.nodes, trace.start, trace.duration_s) == (("a", "b", "c"), ("a", "b"), 120)
    assert trace.events == (Lost(t_s=60, node="a"), Joined(t_s=120, node="c"))


def test_counts_choose_the_node_that_goes_by_the_seed() -> None:
    trace = read("bamboo")
    assert trace.counts == ((0, 3), (60, 1), (90, 2))
    assert trace.duration_s == 90
    assert {read("bamboo", seed=seed).events for seed in range(20)} != {trace.events}


def test_times_with_decimals_are_hours() -> None:
    assert read("bamboo", "0.000,2\n1.500,2\n1.500,1\n").events[0].t_s == 5400


@pytest.mark.parametrize("header", ["milliseconds,count", "time_ms,nodes", "Time (ms),instances", "t_ms, n"])
def test_a_header_names_the_unit_of_times(header: str) -> None:
    text = f"{header}\n0,2\n60000,2\n60000,1\n"
    assert detect_format(text) == "bamboo"
    assert read("bamboo", text).events[0].t_s == 60
    assert read("bamboo", text.replace(header, "seconds,count")).events[0].t_s == 60_000


def test_counts_for_longer_than_any_published_need_a_unit() -> None:
    text = "0,2\n41040000,2\n41040000,1\n"  # 11.4 hours in milliseconds, 475 days in seconds
    with pytest.raises(ConfigError, match="in seconds it would last 475 days; name the unit with --unit"):
        read("bamboo", text)
    assert read("bamboo", text, unit="ms").events[0].t_s == 41_040
    assert read("bamboo", text, unit="s").events[0].t_s == 41_040_000


def test_a_unit_is_refused_where_the_format_has_one() -> None:
    with pytest.raises(ConfigError, match="leave --unit out"):
        read("oobleck", unit="s")
    with pytest.raises(ConfigError, match="line 1: it says that times are in ms, and --unit says s"):
        read("bamboo", "time_ms,count\n0,2\n", unit="s")


def test_a_parcae_trace_ends_with_its_last_line() -> None:
    trace = read("parcae")
    assert (trace.start, trace.duration_s) == (("a", "b"), 8)
    assert trace.events == (Lost(t_s=3, node="a"),)


def test_a_skypilot_trace_has_a_count_for_each_gap() -> None:
    trace = read("skypilot")
    assert trace.counts == ((0, 2), (1200, 1), (1800, 3))
    assert trace.duration_s == 2400


def test_a_node_is_away_while_any_of_its_faults_lasts() -> None:
    trace = read("infinitehbd", num_nodes=4)
    assert trace.nodes == ("x", "y", "healthy0", "healthy1")
    day_s = 86_400
    assert trace.events == (
        Lost(t_s=day_s, node="x"),
        Joined(t_s=2 * day_s, node="x"),
        Lost(t_s=3 * day_s, node="y"),
    )


def test_lanl_failures_begin_and_are_fixed_at_their_times() -> None:
    trace = read("lanl")
    assert [(event.t_s, type(event), event.node) for event in trace.events] == [  # type: ignore[union-attr]
        (0, Lost, "node7"),
        (3600, Lost, "node9"),
        (5400, Joined, "node9"),
        (7200, Joined, "node7"),
        (86_400, Lost, "node7"),
    ]


@pytest.mark.parametrize(
    ("format_name", "text", "message"),
    [
        ("oobleck", "", "no node ever joins or leaves"),
        ("oobleck", "0,add,a\n1,drop,a\n", "line 2: '1,drop,a' is not"),
        ("oobleck", "0,add,a\nx,remove,a\n", "line 2: 'x' is not a number"),
        ("oobleck", "0,add,a\n0,add,a\n", "line 2: a joins, but is present already"),
        ("oobleck", "0,add,a\n\n5,remove,b\n", "line 3: b leaves, but is not present"),
        ("oobleck", "5,add,a\n1,remove,a\n", "line 2: time goes backwards"),
        ("bamboo", "", "the file is empty"),
        ("bamboo", "0,1,2\n", "line 1: '0,1,2' is not `time,count`"),
        ("bamboo", "0,1.5\n", "line 1: '1.5' is not a number of nodes"),
        ("bamboo", "0,-1\n", "not a number of nodes"),
        ("bamboo", "5,1\n1,2\n", "line 2: time goes backwards"),
        ("bamboo", "0,0\n1,0\n", "no node is ever present"),
        ("parcae", "{", "line 1: not JSON"),
        ("parcae", "[1, 2]", r"line 1: '\[1, 2\]' is not"),
        ("parcae", '[1, "explode", {}]', "line 1: event is 'explode'"),
        ("parcae", '[1, "add", {"nodes": "a"}]', "nodes must be a list"),
        ("skypilot", "[]", "the file must be an object"),
        ("skypilot", '{"data": []}', "no metadata"),
        ("skypilot", '{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0"),
        ("skypilot", '{"metadata": {"gap_seconds": 1}, "data": ["x"]}', "data, entry 0: 'x' is not a number"),
        ("infinitehbd", "{}", "the file must be a list"),
        ("infinitehbd", INFINITEHBD.replace("fault_end", "fault_over"), "event_type is 'fault_over'"),
        ("lanl", "nodenumz,Prob Started,Prob Fixed\n", "the file lists no failures"),
        ("lanl", "nodenumz,Prob Started,Prob Fixed\n1,yesterday,\n", "line 2: 'yesterday' is not a time"),
        ("lanl", "nodenumz,Prob Started,Prob Fixed\n,06/01/2003 10:00,\n", "line 2: nodenumz is missing"),
    ],
)
def test_a_bad_file_is_named_with_its_place(format_name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(format_name, text)
    assert str(caught.value).startswith("file: ")


def test_a_cluster_smaller_than_the_nodes_that_fail_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 nodes fail.* 1 "):
        read("infinitehbd", num_nodes=1)


@given(text=st.text(alphabet=st.sampled_from('0123456789.,-:"[]{}\n addremovenodx/'), max_size=120))
def test_any_text_is_a_trace_or_an_error_of_ours(text: str) -> None:
    for format_name in FORMATS:
        try:
            read(format_name, text)
        except ConfigError as error:
            if not str(error).startswith("file: "):
                raise


@pytest.mark.skipif(not DATA.exists(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("path", "num_nodes", "rate"),
    [
        ("oobleck-sosp23/p3-trace.csv", 177, 0.61),
        ("oobleck-sosp23/g4dn-trace.csv", 79, 0.55),
        ("oobleck-sosp23/scaled/scale_gcp-trace.csv", 89, 0.31),
        ("infinitehbd/fault_trace.json", 400, 4.2 / 24_000),
        ("bamboo/aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv", 16, None),
    ],
)
def test_the_public_traces_say_what_was_published_of_them(path: str, num_nodes: int, rate: float | None) -> None:
    text = (DATA / path).read_text()
    name = detect_format(text)
    assert name is not None
    facts = facts_of(convert(text, format_name=name, name=path, num_nodes=400 if name == "infinitehbd" else None))
    assert facts.num_nodes == num_nodes
    if rate is not None:
        assert facts.losses_per_node_hour == pytest.approx(rate, rel=0.05)

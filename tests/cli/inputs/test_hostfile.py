"""Hostfiles: what lines mean, and what is said of those that mean nothing."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.inputs.hostfile import parse_hostfile
from oobleck.errors import ConfigError
from oobleck.job import MAX_DEVICES, MAX_NODES, NodeSpec
from tests.examples import examples


def parse(text: str) -> tuple[NodeSpec, ...]:
    return parse_hostfile(text, source="hosts")


def names(text: str) -> list[str]:
    return [node.name for node in parse(text)]


def test_lines_of_all_kinds():
    text = """
        # the lab
        node1 slots=4 port=22
        30.207.99.20 slots=4 devices=0,1,2,3 port=22
        30.207.99.20 slots=4 devices=4,5,6,7 port=22

        user@node[2-3] slots=2    # borrowed
    """
    assert parse(text) == (
        NodeSpec(name="node1", host="node1", devices=(0, 1, 2, 3), port=22),
        NodeSpec(name="30.207.99.20", host="30.207.99.20", devices=(0, 1, 2, 3), port=22),
        NodeSpec(name="30.207.99.20#2", host="30.207.99.20", devices=(4, 5, 6, 7), port=22),
        NodeSpec(name="node2", host="node2", devices=(0, 1), user="user"),
        NodeSpec(name="node3", host="node3", devices=(0, 1), user="user"),
    )


def test_a_host_alone_has_one_device():
    assert parse("node1") == (NodeSpec(name="node1", host="node1", devices=(0,)),)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n   # here", "\ufeff# a byte order mark"])
def test_a_file_without_hosts_names_no_node(text):
    assert parse(text) == ()


@pytest.mark.parametrize("text", ["node1\r\nnode2\r\n", "\ufeffnode1\nnode2", "node1\t\n  node2 #x"])
def test_other_line_ends_and_blanks_do_not_matter(text):
    assert names(text) == ["node1", "node2"]


@pytest.mark.parametrize(
    ("pattern", "hosts"),
    [
        ("node[2-5]", ["node2", "node3", "node4", "node5"]),
        ("node[7]", ["node7"]),
        ("node[1,3-4]", ["node1", "node3", "node4"]),
        ("node[3,1]", ["node3", "node1"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[001-2]", ["node001", "node002"]),
        ("node[0-1]", ["node0", "node1"]),
        ("node[00-01]", ["node00", "node01"]),
        ("node[98-101].lab", ["node98.lab", "node99.lab", "node100.lab", "node101.lab"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("[1-2]", ["1", "2"]),
        ("fe80::1%eth0", ["fe80::1%eth0"]),
        ("::1", ["::1"]),
    ],
)
def test_patterns_stand_for_hosts(pattern, hosts):
    assert [node.host for node in parse(pattern)] == hosts


def test_zero_padded_ranges_of_sixteen():
    assert names("node[01-16]") == [f"node{number:02}" for number in range(1, 17)]


@pytest.mark.parametrize(
    ("devices", "expected"), [("0", (0,)), ("3,1", (3, 1)), ("0-3", (0, 1, 2, 3)), ("0,4-5", (0, 4, 5))]
)
def test_devices_are_listed_in_the_order_given(devices, expected):
    assert parse(f"a devices={devices}")[0].devices == expected


def test_slots_may_repeat_what_devices_say():
    assert parse("a slots=2 devices=6,7") == parse("a devices=6,7")


def test_without_devices_a_repeated_host_goes_on_after_those_taken():
    devices = [node.devices for node in parse("a slots=2\nb slots=4\na\na slots=2\na devices=8-9\na")]
    assert devices == [(0, 1), (0, 1, 2, 3), (2,), (3, 4), (8, 9), (10,)]


def test_repeated_hosts_get_names_of_their_own():
    assert names("a\nb\na\nA\na") == ["a", "b", "a#2", "A#3", "a#4"]


def test_behind_another_port_is_another_machine():
    nodes = parse("localhost port=2201 slots=2\nlocalhost port=2202 slots=2\nlocalhost\nlocalhost port=22")
    assert [node.devices for node in nodes] == [(0, 1), (0, 1), (0,), (1,)]
    assert [node.name for node in nodes] == ["localhost", "localhost#2", "localhost#3", "localhost#4"]


@pytest.mark.parametrize("user", ["me", "a.b-c_d", "LAB\\me", "me@lab.org", "host$"])
def test_users_of_all_kinds(user):
    (node,) = parse(f"{user}@node1")
    assert (node.user, node.host, node.name) == (user, "node1", "node1")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a slot=4", "unknown key 'slot'; did you mean slots?"),
        ("a devixes=4", "unknown key 'devixes'; did you mean devices?"),
        ("a Port=4", "unknown key 'Port'; did you mean port?"),
        ("a gpus=4", "unknown key 'gpus'; known are address, device, devices, domain, port, slots"),
        ("a slots=0", "slots=0 is not possible; it must be a whole number from 1 to 256"),
        ("a slots=-1", "slots=-1 is not possible"),
        ("a slots=4.0", "slots=4.0 is not possible"),
        ("a slots=٤", "slots=٤ is not possible"),
        (f"a slots={'9' * 5000}", "is not possible"),
        ("a slots=257", "slots=257 is not possible"),
        ("a port=65536", "port=65536 is not possible; it must be a whole number from 1 to 65535"),
        ("a port=ssh", "port=ssh is not possible"),
        ("a slots", "'slots' is not key=value, written without spaces"),
        ("a slots = 4", "'slots' is not key=value"),
        ("a slots=", "'slots=' is not key=value"),
        ("a =4", "'=4' is not key=value"),
        ("a b", "'b' is not key=value, written without spaces, as in slots=4; one node per line"),
        ("a slots=4 slots=2", "slots is given twice; leave one of slots=4 and slots=2 out"),
        ("a devices=0,0", "devices=0,0 names a device twice"),
        ("a devices=0-2,1", "names a device twice"),
        ("a devices=3-1", "devices=3-1: 3-1 counts down; write 1-3"),
        ("a devices=0,,1", "devices=0,,1: '' is neither a number nor a range"),
        ("a devices=x", "devices=x: 'x' is neither a number nor a range of them, as in 0,2-5"),
        ("a devices=256", "device 256 is not possible; it must be less than 256"),
        ("a devices=0-999999999", "device 999999999 is not possible"),
        ("a slots=2 devices=0-2", "slots=2, but devices=0-2 names 3; make them agree, or leave slots out"),
        ("node[5-2]", "node[5-2]: 5-2 counts down; write 2-5"),
        ("node[]", "node[]: '' is neither a number nor a range"),
        ("node[a-b]", "node[a-b]: 'a-b' is neither a number nor a range"),
        ("node[1-2", "'node[1-2' is not a host; use letters"),
        ("node1-2]", "'node1-2]' is not a host"),
        ("node[[1]]", "'node[[1]]' is not a host"),
        ("node[1,1]", "node[1,1] names node1 twice; name each host once"),
        ("n[1,11][1,11]", "n[1,11][1,11] names n111 twice"),
        ("node[1-999999999]", f"names more than {MAX_NODES} nodes"),
        ("a[1-999]b[1-999]", f"names more than {MAX_NODES} nodes"),
        ("node1:4", "'node1:4' is not a host; write 'node1 port=4' or 'node1 slots=4'"),
        ("[::1]", "'[::1]' is not an IPv6 address; write it without brackets, as in 2001:db8::7"),
        ("a:b", "'a:b' is not an IPv6 address"),
        ("1:2:3", "'1:2:3' is not an IPv6 address"),
        ("::1%$(reboot)", "is not an IPv6 address"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("$(reboot)", "'$(reboot)' is not a host"),
        ("nöde", "'nöde' is not a host"),
        ("slots=4", "'slots=4' is not a host"),
        ("@a", "'@a' is not a host; write HOST or USER@HOST"),
        ("-l@a", "'-l@a' is not a host; write HOST or USER@HOST"),
        ("me@", "'' is not a host"),
    ],
)
def test_errors_name_file_line_value_and_remedy(line, problem):
    with pytest.raises(ConfigError) as error:
        parse(f"# first\nnode0\n\n{line}\nnode9 nonsense")
    assert str(error.value).startswith("hosts:4: ")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "device", "first_line"),
    [
        ("a devices=0-3\na devices=3-4", 2, 3, 1),
        ("a slots=2\n\n# x\nA devices=1", 4, 1, 1),
        ("b\na devices=0\nme@a devices=0", 3, 0, 2),
        ("a[1-2]\na[2-3] devices=0", 2, 0, 1),
        ("a port=22\na devices=0", 2, 0, 1),
    ],
)
def test_a_device_belongs_to_one_line(text, line, device, first_line):
    with pytest.raises(ConfigError, match=rf"^hosts:{line}: device {device} .*line {first_line}\b"):
        parse(text)


def test_a_host_that_is_repeated_too_often_runs_out_of_devices():
    with pytest.raises(ConfigError, match=rf"^hosts:2: device {MAX_DEVICES} of a\b"):
        parse(f"a slots={MAX_DEVICES}\na")


def test_the_most_nodes_are_possible_and_one_more_is_not():
    text = f"a[1-{MAX_NODES - 1}]\nb"
    assert len(parse(text)) == MAX_NODES
    with pytest.raises(ConfigError, match=rf"^hosts:3: .*\b{MAX_NODES}\b"):
        parse(f"{text}\nc")


WORDS = ("node", "[1-3]", "[01-12]", "me@", "::1", " # ", " slots=", " slots=2", " devices=0-1", " port=22", "\r\n")
PIECES = st.sampled_from([*WORDS, *"a19[]-,@#=:%. \t\n\x00é\u2028"])


@examples(500)
@given(text=st.text(max_size=60) | st.lists(PIECES, max_size=12).map("".join))
def test_any_text_gives_sound_nodes_or_a_config_error_that_names_a_line(text):
    try:
        nodes = parse(text)
    except ConfigError as error:
        source, line, problem = str(error).split(":", 2)
        assert source == "hosts"
        assert 1 <= int(line) <= text.count("\n") + 1
        assert problem.strip()
        return
    assert len({node.name for node in nodes}) == len(nodes)
    taken = defaultdict(list)
    for node in nodes:
        assert node.devices
        taken[node.host.lower(), node.port or 22].extend(node.devices)
    assert all(len(set(devices)) == len(devices) for devices in taken.values())


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("node1", [None]),
        ("node1 address=10.0.0.7", ["10.0.0.7"]),
        ("node1 address=fe80::1%eth1", ["fe80::1%eth1"]),
        ("node[1-3] address=10.0.0.[1-3]", ["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        ("node[1-2] address=node[1-2]-ib", ["node1-ib", "node2-ib"]),
        ("node[1-2] address=ib0", ["ib0", "ib0"]),
    ],
)
def test_an_address_for_training_belongs_to_each_host(text, addresses):
    assert [node.address for node in parse(text)] == addresses


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node[1-2] address=10.0.0.1", "names 1 address for 2 hosts; name one for each"),
        ("node[1-3] address=10.0.0.[1-2]", "names 2 addresses for 3 hosts"),
        ("node1 address=10.0.0.[1-2]", "names 2 addresses for 1 host;"),
        ("node1 address=10.0.0.1,10.0.0.2", "address=10.0.0.1,10.0.0.2: .*is not a host"),
        ("node1 address=a address=b", "address is given twice"),
    ],
)
def test_addresses_that_do_not_fit_their_hosts_are_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(text)


HOSTS = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(
    lines=st.lists(
        st.tuples(
            HOSTS,
            st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True),
            st.none() | st.integers(1, 65_535),
            st.none() | st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True),
        ),
        unique_by=lambda line: line[0],
        max_size=6,
    ),
    comment=st.text(st.characters(exclude_characters="\n"), max_size=10),
)
def test_what_is_written_out_in_full_is_read_back(lines, comment):
    text = "\n".join(
        f"{user + '@' if user else ''}{host} devices={','.join(map(str, devices))}"
        f"{f' port={port}' if port else ''} # {comment}"
        for host, devices, port, user in lines
    )
    assert parse(text) == tuple(
        NodeSpec(name=host, host=host, devices=tuple(devices), port=port, user=user)
        for host, devices, port, user in lines
    )


@given(first=st.integers(0, 2000), count=st.integers(1, 50), width=st.integers(0, 6))
def test_ranges_keep_their_width(first, count, width):
    last = first + count - 1
    hosts = [node.host for node in parse(f"n[{first:0{width}}-{last}]")]
    assert hosts == [f"n{number:0{width}}" for number in range(first, last + 1)]


def test_nodes_may_have_different_devices():
    first, second, plain = parse("node[1-2] slots=8 device=A100\nnode3 slots=4")
    assert (first.device, first.kind, second.kind) == ("A100", "A100×8", "A100×8")
    assert (plain.device, plain.kind) == ("default", "default×4")
    assert parse("node1 device=A40")[0].kind == "A40"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node1 device=3", "device=3: '3' is not a name of a kind of devices; use letters, digits, '.', '_', '+' and "),
        ("node1 device=3", "; devices=3 says which devices a node has"),
        ("node1 device=A100×8", "'A100×8' is not a name of a kind"),
        ("node1 device=" + "a" * 65, "at most 64, as in A100"),
        ("node1 devic=A100", "unknown key 'devic'; did you mean devic"),
    ],
)
def test_what_is_no_device_is_refused(line: str, words: str):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert str(caught.value).startswith("hosts:1: ")
    assert words in str(caught.value)


def test_a_run_has_few_kinds():
    lines = [f"n{number} slots={number}" for number in range(1, 6)]
    assert len(parse("\n".join(lines[:4]))) == 4
    with pytest.raises(ConfigError, match=r"hosts:5: there are 5 kinds of nodes by now \(default, default×2, "):
        parse("\n".join(lines))


def test_nodes_that_fail_together_are_those_of_a_rack_or_of_a_machine():
    nodes = parse("node[1-2] domain=b7\nnode3 devices=0\nnode3 devices=1")
    assert [node.failure_domain for node in nodes] == ["domain b7", "domain b7", "node3", "node3"]


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("node[1-3] domain=rack-[1-3]", ["rack-1", "rack-2", "rack-3"]),
        ("node[1-4] domain=rack-[01,01,02,02]", ["rack-01", "rack-01", "rack-02", "rack-02"]),
        ("node[1-2] domain=eu-west/a,b", ["eu-west/a,b", "eu-west/a,b"]),
        ("node[1-2] domain=z[7]", ["z7", "z7"]),
    ],
)
def test_a_domain_belongs_to_each_host_or_is_that_of_all(text, domains):
    assert [node.domain for node in parse(text)] == domains


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node[1-4] domain=rack[1-2]", r"domain=rack\[1-2\] names 2 domains for 4 hosts; name one for each"),
        ("node1 domain=rack[1-2]", r"domain=rack\[1-2\] names 2 domains for 1 host;"),
        ("node[1-2] domain=rack[1", r"domain=rack\[1: brackets .* in pairs, around numbers"),
        ("node[1-2] domain=rack[a-b]", r"domain=rack.*: 'a-b' is neither a number nor a range"),
        ("node[1-2] domain=r[1-9][1-9999]", "names more than"),
    ],
)
def test_domains_that_do_not_fit_their_hosts_are_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(text)

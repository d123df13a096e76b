"""What a new version of a list of nodes means to a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.inputs.hostfile import parse_hostfile
from oobleck.job import NodeSpec
from oobleck.runtime.launchers import Arrived, Hostfile, Leaving, ListedNodes, NodeChange, Reported
from oobleck.runtime.launchers.listed import ListedChanges, listed_changes
from oobleck.runtime.ssh import SSHOptions

INTERVAL_S = 0.02


def nodes_of(*lines: str) -> tuple[NodeSpec, ...]:
    return parse_hostfile("\n".join(lines), source="hosts")


def names(specs: tuple[NodeSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def edit(before: list[str], after: list[str]) -> ListedChanges:
    return listed_changes(nodes_of(*before), nodes_of(*after))


def test_new_lines_join_and_deleted_ones_leave() -> None:
    changes = edit(["a", "b", "c"], ["b", "c", "d slots=1"])
    assert (names(changes.joining), changes.leaving, changes.altered) == (["d"], ("a",), ())
    assert names(changes.nodes) == ["b", "c", "d"]


def test_the_second_line_of_a_host_keeps_its_name_when_the_first_is_deleted() -> None:
    before = ["a devices=0", "a devices=1", "b"]
    changes = edit(before, ["a devices=1", "b"])
    assert (changes.joining, changes.leaving, names(changes.nodes)) == ((), ("a",), ["a#2", "b"])
    again = listed_changes(changes.nodes, nodes_of("a devices=1", "a devices=2", "b"))
    assert names(again.joining) == ["a#3"]
    assert again.leaving == ()


def test_a_new_line_never_takes_the_name_of_a_node_that_leaves() -> None:
    changes = edit(["a devices=0", "a devices=1"], ["a devices=1", "a devices=2"])
    assert changes.leaving == ("a",)
    assert names(changes.joining) == ["a#3"]


@pytest.mark.parametrize("line", ["a port=2222", "a devices=3", "root@a", "a address=10.0.0.1"])
def test_a_line_that_says_something_else_of_a_node_neither_drains_nor_adds_it(line: str) -> None:
    changes = edit(["a", "b"], [line, "b"])
    assert (changes.joining, changes.leaving, changes.altered) == ((), (), ("a",))
    assert listed_changes(changes.nodes, nodes_of(line, "b")).altered == (), "told once"


lines = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=8, unique=True)


@given(versions=st.lists(lines, min_size=2, max_size=5))
def test_whatever_is_edited_the_run_follows_the_file(versions: list[list[tuple[str, int]]]) -> None:
    files = [nodes_of(*(f"{host} devices={device}" for host, device in version)) for version in versions]
    nodes, running = files[0], {spec.name: spec for spec in files[0]}
    for file in files[1:]:
        changes = listed_changes(nodes, file)
        for name in changes.leaving:
            del running[name]
        for spec in changes.joining:
            assert spec.name not in running
            running[spec.name] = spec
        running |= {spec.name: spec for spec in changes.nodes if spec.name in changes.altered}
        nodes = changes.nodes
        assert running == {spec.name: spec for spec in nodes}
        assert [(spec.host, spec.devices) for spec in nodes] == [(spec.host, spec.devices) for spec in file]


class Follower:
    """Takes what a session takes."""

    def __init__(self, path: Path) -> None:
        self.done: list[str] = []
        self.told: list[str] = []
        hostfile = Hostfile(path=path, interval_s=INTERVAL_S)
        self._launcher = ListedNodes(hostfile, path.read_text(), parse=parse_hostfile, options=SSHOptions())

    async def run(self) -> None:
        """Follow the file until cancelled."""
        reported, changes = trio.open_memory_channel[NodeChange](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._launcher.follow, reported)
            async for change in changes:
                self.take(change)

    def take(self, change: NodeChange) -> None:
        match change:
            case Arrived(node=spec):
                self.done.append(f"+{spec.name}")
            case Leaving(node=node):
                self.done.append(f"-{node}")
            case Reported(level=level, text=text):
                self.told.append(f"{level}: {text}")


async def until(condition) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110  what is waited for is a list
            await trio.sleep(INTERVAL_S)


@pytest.fixture
async def watched(tmp_path: Path, nursery: trio.Nursery) -> tuple[Path, Follower]:
    path = tmp_path / "hosts"
    path.write_text("a\nb\n")
    follower = Follower(path)
    nursery.start_soon(follower.run)
    await trio.sleep(5 * INTERVAL_S)
    return path, follower


async def test_an_edit_is_followed(watched: tuple[Path, Follower]) -> None:
    path, follower = watched
    path.write_text("b\nc\n")
    await until(lambda: len(follower.done) == 2)
    assert follower.done == ["+c", "-a"]
    assert follower.told == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [("a\nb slotz=3\n", "hosts:2: unknown key 'slotz'"), ("", "names no node"), ("# nobody\n", "names no node")],
)
async def test_a_broken_edit_is_told_once_and_changes_nothing(
    watched: tuple[Path, Follower], broken: str, words: str
) -> None:
    path, follower = watched
    path.write_text(broken)
    await until(lambda: follower.told)
    await trio.sleep(5 * INTERVAL_S)
    (told,) = follower.told
    assert told.startswith("warning: ")
    assert words in told
    path.write_text("a\nb\nc\n")
    await until(lambda: follower.done)
    assert follower.done == ["+c"]


async def test_a_file_that_is_gone_is_told_and_drains_nobody(watched: tuple[Path, Follower]) -> None:
    path, follower = watched
    path.unlink()
    await until(lambda: follower.told)
    assert str(path) in follower.told[0]
    assert follower.done == []


async def test_lines_in_another_order_are_no_new_version(watched: tuple[Path, Follower]) -> None:
    path, follower = watched
    path.write_text("b\na\n")
    await trio.sleep(5 * INTERVAL_S)
    assert (follower.told, follower.done) == ([], [])
    path.write_text("b\n")
    await until(lambda: follower.done)
    assert follower.done == ["-a"]

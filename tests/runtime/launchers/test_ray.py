"""What is asked of Ray, with a stand-in for it whose actors live in our own process; tests/e2e/test_ray.py has Ray."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import trio

from oobleck.cli.inputs import NodeOptions, parse_hostfile, read_source
from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.launchers import DialedInNodes, NodeChange, RayActors, Reported, listen, ray_nodes, settle_keys
from oobleck.runtime.ssh import open_ssh_loop
from tests.processes import words_of
from tests.runtime.ssh_servers import until

STAND_IN = """
import os
import time

from .exceptions import RayError

class Method:
    def __init__(self, function):
        self.remote = function

class Handle:
    def __init__(self, thing):
        for name in ("update", "exit_code", "stop"):
            setattr(self, name, Method(getattr(thing, name)))

class Options:
    def __init__(self, cls):
        self.cls = cls

    def options(self, *, lifetime, get_if_exists, scheduling_strategy, **others):
        assert (lifetime, get_if_exists, scheduling_strategy.soft) == ("detached", True, False)
        return self

    def remote(self, *arguments):
        return Handle(self.cls(*arguments))

remote = Options

def init(address, **others):
    print("\\x1b[31mRay says something\\x1b[0m", flush=True)
    if "SILENT_INIT" in os.environ:
        time.sleep(60)
    if "NO_CLUSTER" in os.environ:
        raise ConnectionError("Could not find any running Ray instance.")

def nodes():
    while os.path.exists(os.environ.get("HEAD_IS_GONE", "/dev/null/none")):
        time.sleep(0.05)
    if "ODD" in os.environ:
        raise RayError("\\x1b[31mred\\x1b[0m\\nand more")
    names = os.environ["RAY_NODES"].split()
    return [
        {"NodeID": f"{index}" * 56, "NodeName": name, "Alive": True, "Resources": {"CPU": 4.0, "GPU": float(index)}}
        for index, name in enumerate(names)
    ] + [{"NodeID": "d" * 56, "NodeName": "dead", "Alive": False, "Resources": {"CPU": 4.0}}]

def wait(asked, timeout, num_returns=1):
    return asked, []

def get(answer):
    return answer

def kill(handle):
    pass
"""


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "stand_in" / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "exceptions.py").write_text("class RayError(Exception):\n    pass\n")
    (package / "util" / "__init__.py").write_text("def get_node_ip_address():\n    return '127.0.0.1'\n")
    (package / "util" / "scheduling_strategies.py").write_text(
        textwrap.dedent(
            """
            class NodeAffinitySchedulingStrategy:
                def __init__(self, node_id, soft):
                    self.soft = soft
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("RAY_NODES", "head worker worker")
    monkeypatch.setenv("HOME", str(tmp_path))


async def test_the_nodes_are_those_that_live_by_names_that_are_their_own(ray: None) -> None:
    assert await ray_nodes() == ("head", "worker-11111111", "worker-22222222")


async def test_where_there_is_no_cluster_that_is_said(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_CLUSTER", "1")
    with pytest.raises(ConfigError, match=r"no Ray cluster can be joined from here: Could not find any running Ray"):
        await ray_nodes()


async def test_a_cluster_without_a_node_for_work_is_named(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_NODES", "")
    with pytest.raises(ConfigError, match="no node with a CPU"):
        await ray_nodes()


@pytest.mark.skipif("ray" in sys.modules, reason="Ray is loaded")
def test_without_ray_or_with_other_nodes_the_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "ray").exists()])
    with pytest.raises(UsageError, match=r"pip install ray"):
        read_source(None, NodeOptions(ray=True))
    with pytest.raises(UsageError, match="--ray names all nodes"):
        read_source(None, NodeOptions(ray=True, local=4))


async def test_every_node_of_the_cluster_dials_in_and_ends_with_the_run(ray: None, tmp_path: Path) -> None:
    async with open_ssh_loop(), trio.open_nursery() as nursery:
        listeners, place = await listen("127.0.0.1", 0)
        keys, file = settle_keys(
            tmp_path / "keys", master=place.replace("127.0.0.1", "name.that.nobody.knows"), renew=False
        )
        callers = DialedInNodes(num_first=3, parse=parse_hostfile, patience_s=5.0)
        nursery.start_soon(callers.serve, listeners, keys)
        actors = RayActors(run_id="run", file=file, is_place_named=False, log=tmp_path / "ray.log", callers=callers)
        nursery.start_soon(actors.run)
        with trio.fail_after(30):
            nodes = {node.name: node for node in await callers.begin()}
        assert {name: node.num_devices for name, node in nodes.items()} == {
            "head": 1,
            "worker-11111111": 1,
            "worker-22222222": 2,
        }
        assert nodes["head"].origin == "Ray node 000000000000"
        started = [each for each in psutil.Process().children(recursive=True) if "node" in words_of(each)]
        assert len(started) == 3
        await callers.release(nodes["head"])
        await until(lambda: len(callers.nodes) == 2)
        await actors.end()
        assert psutil.wait_procs(started, timeout=10)[1] == []
        nursery.cancel_scope.cancel()


@pytest.fixture
async def callers(nursery: trio.Nursery) -> DialedInNodes:
    return DialedInNodes(num_first=1, parse=parse_hostfile, patience_s=5.0)


@pytest.fixture
async def said(callers: DialedInNodes, nursery: trio.Nursery) -> list[str]:
    """What people are to read."""
    texts: list[str] = []

    async def follow() -> None:
        reported, changes = trio.open_memory_channel[NodeChange](100)
        async with trio.open_nursery() as following:
            following.start_soon(callers.follow, reported)
            async for change in changes:
                assert isinstance(change, Reported)
                texts.append(change.text)

    nursery.start_soon(follow)
    return texts


def actors_of(callers: DialedInNodes, directory: Path, **options: float) -> RayActors:
    _, file = settle_keys(directory / "keys", master="127.0.0.1:1", renew=False)
    log = directory / "ray.log"
    return RayActors(run_id="run", file=file, is_place_named=True, log=log, callers=callers, **options)


@pytest.mark.slow  # two silences, which are to be longer than what a busy machine makes
async def test_a_head_that_is_gone_is_told_once_and_its_return_too_and_the_end_does_not_wait_for_it(
    ray: None,
    tmp_path: Path,
    callers: DialedInNodes,
    said: list[str],
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setenv("HEAD_IS_GONE", str(gone))
    monkeypatch.setenv("RAY_NODES", "")
    actors = actors_of(callers, tmp_path, silent_s=2.5)
    nursery.start_soon(actors.run)
    await until(lambda: "Ray says something" in _text_of(tmp_path / "ray.log"))
    await trio.sleep(3.0)
    assert said == [], "it answers"
    gone.touch()
    await until(lambda: said)
    assert "Ray cannot be asked: it has not answered for 2.5 s" in said[0]
    await trio.sleep(3.0)
    assert len(said) == 1
    gone.unlink()
    await until(lambda: len(said) == 2)
    assert said[1] == "Ray answers again"
    gone.touch()
    await until(lambda: len(said) == 3)
    with trio.fail_after(5.0):
        await actors.end()


async def test_what_ray_prints_is_for_its_log_and_what_people_read_has_no_escapes(
    ray: None,
    tmp_path: Path,
    callers: DialedInNodes,
    said: list[str],
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ODD", "1")
    nursery.start_soon(actors_of(callers, tmp_path).run)
    await until(lambda: said)
    assert said[0] == "Ray does not answer: ?[31mred?[0m"
    assert "Ray says something" in _text_of(tmp_path / "ray.log")
    assert not any("Ray says something" in text for text in said)


async def test_a_process_that_ends_again_and_again_is_told_once(
    ray: None,
    tmp_path: Path,
    callers: DialedInNodes,
    said: list[str],
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_CLUSTER", "1")
    nursery.start_soon(actors_of(callers, tmp_path, again_s=0.1).run)
    await until(lambda: _text_of(tmp_path / "ray.log").count("no Ray cluster can be joined") >= 2)
    assert len(said) == 1
    assert "Ray cannot be asked: the process that talks to it has ended; see" in said[0]


async def test_an_end_does_not_wait_for_a_ray_that_has_not_answered_yet(
    ray: None, tmp_path: Path, callers: DialedInNodes, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILENT_INIT", "1")
    actors = actors_of(callers, tmp_path)
    nursery.start_soon(actors.run)
    await until(lambda: "Ray says something" in _text_of(tmp_path / "ray.log"))
    with trio.fail_after(5.0):
        await actors.end()


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""

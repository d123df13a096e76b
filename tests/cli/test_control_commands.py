"""status, kill and stop against a run's real control socket."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import trio

from oobleck.cli.main import main
from oobleck.control.journal.view import RunView
from oobleck.errors import UsageError
from oobleck.runtime.control_client import KillRequest, StatusRequest, StopRequest
from oobleck.runtime.control_socket import serve_control
from oobleck.runtime.files.run_dir import RunDirectory
from tests.control.journals import run_with_a_loss


class FakeRun:
    """Answers as a run does that is 20 seconds old, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.view = RunView()
        for entry in run_with_a_loss():
            if entry.t_s <= 20:
                self.view.apply(entry)

    async def answer(self, request):
        self.asked.append(request)
        match request:
            case StatusRequest():
                return self.view.at(20.0).to_dict()
            case KillRequest(node=node) if node != "node1":
                raise UsageError(f"there is no node {node!r}; the nodes are node1")
        return {"done": True}


@pytest.fixture
async def runs(nursery, tmp_path):
    found = {}
    for tag in ("first", "second"):
        directory = RunDirectory(base_dir=tmp_path, tag=tag)
        directory.create()
        found[tag] = FakeRun()
        await nursery.start(serve_control, directory.control_socket, found[tag].answer)
    return found


@pytest.fixture
def oobleck(tmp_path, capsys):
    async def oobleck(*arguments: str) -> tuple[int, str, str]:
        code = await trio.to_thread.run_sync(partial(main, [*arguments, "--base-dir", str(tmp_path)]))
        return code, *capsys.readouterr()

    return oobleck


async def test_status_draws_the_run(runs, oobleck):
    code, out, err = await oobleck("status", "first")
    assert (code, err) == (0, "")
    for words in ("gpt2-demo", "step 30/120", "node3", "layers 4-7", "generation 1: 2 pipelines on 4 nodes"):
        assert words in out


async def test_status_as_json_is_the_snapshot(runs, oobleck):
    code, out, _ = await oobleck("status", "second", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(runs["second"].view.at(20.0).to_dict()))


async def test_kill_reaches_the_run_that_was_named(runs, oobleck):
    assert await oobleck("kill", "node1", "--tag", "second") == (0, "killed node1 of run second\n", "")
    assert runs["second"].asked == [KillRequest(node="node1")]
    assert runs["first"].asked == []


async def test_what_the_run_says_is_wrong_is_told(runs, oobleck):
    code, out, err = await oobleck("kill", "node7", "--tag", "first")
    assert (code, out) == (2, "")
    assert "'node7'" in err
    assert err.endswith("node1\n"), "those that there are"


@pytest.mark.parametrize(("options", "now", "how"), [((), False, "after its step"), (("--now",), True, "at once")])
async def test_stop(runs, oobleck, options, now, how):
    assert await oobleck("stop", "first", *options) == (0, f"run first stops {how}\n", "")
    assert runs["first"].asked == [StopRequest(now=now)]


@pytest.mark.parametrize("command", [("kill", "node1"), ("stop",)])
async def test_every_command_speaks_json(runs, oobleck, command):
    tag = ("--tag", "first") if command[0] == "kill" else ("first",)
    code, out, _ = await oobleck(*command, *tag, "--json")
    assert (code, json.loads(out)) == (0, {"done": True})


async def test_without_a_tag_several_runs_are_an_error_that_lists_them(runs, oobleck):
    code, _, err = await oobleck("stop")
    assert code == 2
    assert "(active: first, second)" in err


async def test_an_unknown_tag_is_an_error_that_lists_the_active_ones(runs, oobleck):
    code, _, err = await oobleck("status", "third")
    assert code == 2
    assert "third" in err
    assert "(active: first, second)" in err


async def test_a_run_of_another_version_is_told_as_that(nursery, oobleck, tmp_path):
    async def answer(_request):
        return {"state": "levitating"}

    directory = RunDirectory(base_dir=tmp_path, tag="odd")
    directory.create()
    await nursery.start(serve_control, directory.control_socket, answer)
    code, _, err = await oobleck("status")
    assert code == 1
    assert "another version" in err


async def test_nodes_are_added_one_by_one_and_those_that_are_refused_are_told(nursery, oobleck, tmp_path):
    asked = []

    async def answer(request):
        asked.append(request.node)
        if request.node in ("node1", "node3"):
            raise UsageError(f"refused: {request.node}")
        return {"adding": request.node}

    directory = RunDirectory(base_dir=tmp_path, tag="only")
    directory.create()
    await nursery.start(serve_control, directory.control_socket, answer)
    code, out, err = await oobleck("add", "node1", "node2", "node3", "node4")
    assert asked == ["node1", "node2", "node3", "node4"]
    assert code == 2
    assert [line.split()[0] for line in out.splitlines()] == ["node2", "node4"]
    assert err == "oobleck: refused: node1\noobleck: refused: node3\n"


@pytest.mark.parametrize(
    "words", [["status"], ["stop"], ["kill", "node1"], ["add", "node1"], ["drain", "node1"]], ids=lambda words: words[0]
)
async def test_every_command_that_asks_a_run_takes_its_tag_as_an_option(runs, oobleck, words):
    code, _, err = await oobleck(*words, "--tag", "second")
    assert (code, err) == (0, "")
    assert (len(runs["first"].asked), len(runs["second"].asked)) == (0, 1)


@pytest.mark.parametrize("command", ["status", "stop", "events", "report"])
async def test_two_tags_for_one_run_are_refused(runs, oobleck, command):
    code, _, err = await oobleck(command, "first", "--tag", "second")
    assert code == 2
    assert "--tag: two runs are named, first and second; leave one out" in err
    assert runs["first"].asked == runs["second"].asked == []


async def test_a_shell_completes_the_nodes_of_the_run_that_is_named(runs, tmp_path):
    for entry in run_with_a_loss():  # node3 is lost
        runs["second"].view.apply(entry)

    async def completed(words: str) -> list[str]:
        asked = {"_OOBLECK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        environment = asked | {"OOBLECK_BASE_DIR": str(tmp_path)}
        done = await trio.run_process([sys.executable, "-m", "oobleck"], env=environment, capture_stdout=True)
        return done.stdout.decode().split()

    assert await completed("oobleck kill --tag second node") == ["node0", "node1", "node2", "node3"]
    assert await completed("oobleck logs --tag second -f node1") == ["node1"]
    assert await completed("oobleck add --tag second n") == ["node3"]
    assert await completed("oobleck drain node") == [], "two runs are active"

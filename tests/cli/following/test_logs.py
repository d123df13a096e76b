"""`oobleck logs`: of a run that is over from this machine's files, of an active one through its master."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
import trio

from oobleck.cli.main import main
from oobleck.control.journal import RunView
from oobleck.errors import ExitCode, OobleckError
from oobleck.runtime import control_client
from oobleck.runtime.control_socket import serve_control
from oobleck.runtime.files import NodeLogs, RunDirectory, agent_log, parse_list
from oobleck.wire import encode_json
from tests.control.journals import run_with_a_loss


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of four nodes, node0 to node3; node3 has left no log here."""
    directory = RunDirectory(base_dir=tmp_path, tag="gpt2-demo")
    directory.create()
    directory.journal.write_bytes(b"".join(map(encode_json, run_with_a_loss())))
    for node in ("node0", "node1", "node2"):
        (directory.path / agent_log(node)).write_text(f"first of {node}\nsecond ü\nno end")
    return directory


def logs(run: RunDirectory, *words: str) -> int:
    return main(["logs", *words, "--base-dir", str(run.base_dir)])


def test_all_logs_of_a_run_that_is_over_are_shown_with_their_nodes(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs(run, "-n", "2") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"{node} | {line}" for node in ("node0", "node1", "node2") for line in ("second ü", "no end")
    ]
    assert "the log of node3; it is on that node, as ~/.oobleck/gpt2-demo/agent-node3.log" in shown.err


def test_a_node_s_log_is_shown_as_it_is(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(run, "node1", "--tag", "gpt2-demo") == 0
    assert capsys.readouterr().out == "first of node1\nsecond ü\nno end\n"


def test_ranks_are_told_apart(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        directory = run.path / f"ranks/node0/attempt_3/{rank}"
        directory.mkdir(parents=True)
        (directory / "stdout.log").write_text("out\n")
        (directory / "stderr.log").write_text("err\n")
    assert logs(run, "node0", "-n", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        "node0 | no end",
        "node0 local rank 0 ! | err",
        "node0 local rank 0 | out",
        "node0 local rank 1 ! | err",
        "node0 local rank 1 | out",
    ]


def test_a_node_without_a_log_or_that_is_unknown_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logs(run, "node3") == ExitCode.FAILED
    assert "~/.oobleck/gpt2-demo/agent-node3.log" in capsys.readouterr().err
    assert logs(run, "node9") == ExitCode.USAGE
    assert "there is no node 'node9'; the nodes are node0, node1, node2, node3" in capsys.readouterr().err


class Master:
    """Reads the logs of its nodes in another directory, as on other machines; node2 cannot be reached."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_lists = 0
        self.view = RunView()
        for entry in run_with_a_loss(ends=False):
            self.view.apply(entry)

    async def answer(self, asked: control_client.ControlRequest) -> dict[str, object]:
        match asked:
            case control_client.StatusRequest():
                return self.view.at(20.0).to_dict()
            case control_client.ListLogsRequest(node="node2") | control_client.ReadLogRequest(node="node2"):
                raise OobleckError("node2: cannot be reached")
            case control_client.ListLogsRequest(node=node):
                self.num_lists += 1
                return {"logs": parse_list(self.run(NodeLogs(PurePosixPath(self.directory), node).list()))}
            case control_client.ReadLogRequest(node=node, name=name, offset=offset):
                part = self.run(NodeLogs(PurePosixPath(self.directory), node).read(name, offset))
                return {"text": part.decode("latin-1")}
        raise AssertionError(asked)

    def run(self, command: str) -> bytes:
        return subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False).stdout


async def test_an_active_run_s_master_reads_the_logs_and_they_are_followed_to_its_end(
    run: RunDirectory, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    master = Master(elsewhere)
    log = elsewhere / agent_log("node0")
    log.write_bytes("far\n\xfcber".encode())
    async with trio.open_nursery() as nursery, trio.open_nursery() as serving:
        await serving.start(serve_control, run.control_socket, master.answer)
        show = partial(logs, run, "node0")
        assert await trio.to_thread.run_sync(show) == 0
        assert capsys.readouterr().out == "far\nüber\n"
        assert await trio.to_thread.run_sync(partial(logs, run, "-n", "1")) == 0
        assert "node2: cannot be reached" in capsys.readouterr().err
        master.num_lists = 0
        codes: list[int] = []

        async def follow() -> None:
            codes.append(await trio.to_thread.run_sync(partial(logs, run, "node0", "-f")))

        nursery.start_soon(follow)
        while master.num_lists < 1:  # noqa: ASYNC110  a thread counts
            await trio.sleep(0.01)
        with log.open("ab") as file:
            file.write(b" alles\nnew\n")
        while master.num_lists < 3:  # noqa: ASYNC110  as above
            await trio.sleep(0.01)
        # The run ends, and its last words are in this machine's file, which is as long as what was read.
        (run.path / agent_log("node0")).write_bytes(log.read_bytes() + b"last")
        serving.cancel_scope.cancel()
    assert codes == [0]
    assert capsys.readouterr().out == "far\nüber alles\nnew\nlast\n"

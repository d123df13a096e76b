"""A hostfile, and real OpenSSH servers: the same job on the same code path as virtual nodes, and the same losses."""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck.host.machine import this_machine
from tests.openssh import OpenSSH, needs_openssh, serve_openssh
from tests.processes import words_of

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, stopped
from .harness import TAG, Runner, oobleck, worker_pids

pytestmark = needs_openssh

NODES = ("alpha", "beta", "gamma", "delta")

ADDRESSES = {"gamma": "127.0.0.2"}
"""Where training's own traffic goes, where it is not the address of SSH."""


@pytest.fixture(scope="module")
def servers(runner: Runner) -> Iterator[list[OpenSSH]]:
    """Two machines, as far as SSH can tell: each with its port and its host key."""
    environment = {"TMPDIR": str(runner.temporary), "HOME": str(runner.directory)}
    with (
        serve_openssh(runner.directory / "one", environment=environment) as one,
        serve_openssh(runner.directory / "two", environment=environment) as two,
    ):
        yield [one, two]


@pytest.fixture
def hosts(runner: Runner, servers: list[OpenSSH]) -> tuple[str, ...]:
    """The command line's part that names four nodes, two on each machine."""
    hostfile, config = runner.directory / "hosts.txt", runner.directory / "ssh_config"
    hostfile.write_text("alpha\nbeta\ngamma address=127.0.0.2\ndelta address=lo\n")
    config.write_text(servers[0].host_config(NODES[:2]) + servers[1].host_config(NODES[2:]))
    return (str(hostfile), "--ssh-config", str(config), "--no-check")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without keys and known hosts, so that the config file alone says how nodes are reached."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_hostfile_trains_what_virtual_nodes_train_survives_the_end_of_connections_and_a_kill_and_is_followed(
    runner: Runner,
    endless_reference: Reference,
    hosts: tuple[str, ...],
    servers: list[OpenSSH],
    home: Path,
    variables: tuple[str, ...],
) -> None:
    """SSH connections that all end cost no node: the agents live, and the master finds the way to them again.

    The run's variables are in its processes on nodes, and their values in no file.
    """
    shutil.rmtree(runner.directory / ".oobleck" / TAG, ignore_errors=True)
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), *variables)
    checked = tuple(word for word in hosts if word != "--no-check")  # its probes get the variables first
    with runner.up(*options, nodes=(*checked, PACED)) as up:
        up.wait_for_step(1)
        assert listening_addresses(runner) == {node: ADDRESSES.get(node, "127.0.0.1") for node in NODES}
        workers = worker_pids(runner)
        assert_variables_are_there(workers)
        for server in servers:
            server.kill_sessions()
        for node in NODES:
            up.wait_until_said(f"{node} is reached again")
        up.wait_for_steps(5)
        assert worker_pids(runner) == workers
        assert "RecoveryDone" not in {entry["@type"] for entry in runner.journal()}
        shown = oobleck("logs", "beta", "--tag", TAG, "--base-dir", str(runner.base_dir))
        assert "[beta:0 generation 1] computes under the plan of generation 1" in shown.stdout, shown.stderr
        killed = oobleck("kill", "gamma", "--tag", TAG, "--base-dir", str(runner.base_dir))
        assert killed.returncode == 0, killed.stderr
        up.wait_for_loss("gamma")
        Path(hosts[0]).write_text("alpha\nbeta\ngamma address=127.0.0.2\n")
        up.wait_for("delta has left")
        up.wait_for_steps(6)
        status = oobleck("status", TAG, "--json", "--base-dir", str(runner.base_dir))
        # The command itself is the user's own.
        lines = [" ".join(words_of(process)) for process in runner.processes() if process.pid != up.process.pid]
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, endless_reference)
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [["gamma"], ["delta"]]
    assert all("Accepted publickey" in server.log for server in servers)
    assert runner.left_over() == []
    assert agent_logs(runner) == [f"agent-{node}.log" for node in sorted(NODES)]
    assert "s3cret" not in outcome.output + status.stdout + "".join(lines)
    assert_values_are_in_no_file(runner)


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options that give a run variables in each way, and variables of the shell."""
    monkeypatch.setenv("OF_THE_SHELL", "s3cret shell")
    monkeypatch.setenv("NOT_NAMED", "s3cret")
    of_file = tmp_path / "variables"
    of_file.write_text("OF_THE_FILE='s3cret \"file\" $HOME'\n")
    given = ("--env", "OF_THE_SHELL", "--env-file", str(of_file), "--env", "TWO_LINES=s3cret 'one'\ns3cret two\\")
    return (*given, "--set", "env.OF_THE_JOB=s3cret job")


def assert_variables_are_there(workers: dict[str, int]) -> None:
    assert workers.keys() == set(NODES)
    for pid in workers.values():
        found = psutil.Process(pid).environ()
        assert found["OF_THE_SHELL"] == "s3cret shell"
        assert found["OF_THE_FILE"] == 's3cret "file" $HOME'
        assert found["TWO_LINES"] == "s3cret 'one'\ns3cret two\\"
        assert found["OF_THE_JOB"] == "s3cret job"
        assert "NOT_NAMED" not in found


def assert_values_are_in_no_file(runner: Runner) -> None:
    report = oobleck("report", TAG, "--base-dir", str(runner.base_dir))
    assert report.returncode == 0, report.stderr
    written = [path for place in (runner.base_dir, runner.directory / ".oobleck") for path in place.rglob("*")]
    files = [path for path in written if path.is_file() and not path.is_symlink()]
    assert any(path.name == "report.html" for path in files)
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


@pytest.mark.slow  # tests/control/nodes/test_machines.py has what is decided, tests/roles what is told
def test_nodes_that_are_one_machine_by_several_names_share_its_cores(
    runner: Runner, hosts: tuple[str, ...], home: Path
) -> None:
    shutil.rmtree(runner.directory / ".oobleck" / TAG, ignore_errors=True)
    with runner.up("--job", str(runner.job_file()), "--set", "torch_threads=null", nodes=hosts) as up:
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    logs = "".join(path.read_text() for path in (runner.directory / ".oobleck" / TAG).glob("agent*.log"))
    threads = dict(re.findall(r"\[(\w+):0[^]]*\].*?\b(\d+) threads", logs))  # what each was told last
    share = max(1, this_machine().usable_cores // len(NODES))
    assert threads == dict.fromkeys(NODES, str(share)), logs


def listening_addresses(runner: Runner) -> dict[str, str]:
    """The one address that each node's worker listens at."""
    found = {}
    for node, pid in worker_pids(runner).items():
        connections = psutil.Process(pid).net_connections(kind="tcp")
        (found[node],) = {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def agent_logs(runner: Runner) -> list[str]:
    """The logs that agents keep in the home directory of their nodes, where nobody else can read them."""
    logs = sorted((runner.directory / ".oobleck" / TAG).iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}
    return [path.name for path in logs]

"""SSH as a client, against our own server and OpenSSH's: commands, sockets, and everything that can go wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import asyncssh
import psutil
import pytest
import trio
import trio.testing

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.runtime.ssh import serve_local_nodes
from oobleck.runtime.ssh.asyncssh_adapter import await_asyncio, open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions, connect
from tests.openssh import OpenSSH, free_port, make_key, needs_openssh, serve_openssh
from tests.runtime.ssh_servers import SERVERS, reach, until

NOTICED_S = 0.5
"""A killed server is noticed within milliseconds; the machine may be busy."""


async def unreachable(node: NodeSpec, options: SSHOptions) -> str:
    """Why a node cannot be reached."""
    with pytest.raises(NodeUnreachable) as caught:
        await connect(node, options)
    assert caught.value.node == node.name
    return caught.value.reason


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home directory of the test's own, without keys or known hosts."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / "home" / ".ssh").mkdir(parents=True, mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def openssh(tmp_path):
    with serve_openssh(tmp_path / "openssh") as server:
        yield server


def written(path: Path, *lines: str) -> SSHOptions:
    """Options with a config file of these lines."""
    path.write_text("\n".join(lines))
    return SSHOptions(config=path)


ALPHA = NodeSpec(name="alpha", host="alpha")


# --- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", SERVERS)
async def test_a_command_gets_its_input_and_gives_both_outputs_and_its_status(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        done = await reachable.connection.run("cat; echo oh >&2; exit 7", stdin=b"in", timeout_s=10)
        assert (done.exit_status, done.stdout, done.stderr) == (7, b"in", b"oh\n")


FORCED = "ForceCommand {}"
EVAL = """/bin/sh -c 'printf "no newline"; eval "$SSH_ORIGINAL_COMMAND"'"""


@needs_openssh
@pytest.mark.parametrize(
    ("start_file", "server"),
    [("echo Welcome to the cluster", ""), ("echo oops >&2; seq 20000", ""), ("", FORCED.format(EVAL))],
    ids=["bash greets", "bash greets at length", "sh greets"],
)
async def test_what_a_login_shell_prints_is_not_a_commands_output(start_file, server, tmp_path):
    with serve_openssh(tmp_path / "openssh", more_config=server) as openssh:
        (tmp_path / "openssh" / ".bashrc").write_text(f"{start_file}\n")
        options = written(tmp_path / "config", openssh.host_config(["alpha"]))
        async with open_ssh_loop():
            connection = await connect(ALPHA, options)
            assert (await connection.run("cat", stdin=b"in", timeout_s=10)).stdout == b"in"
            stream = await connection.open_command("exec cat")
            await stream.send_all(b"frames")
            assert await stream.receive_some() == b"frames"
            await connection.aclose()


@needs_openssh
@pytest.mark.parametrize("server", ["ForceCommand echo go away", ""], ids=["forced", "start file"])
async def test_a_login_shell_that_runs_no_command_is_named_with_what_it_prints(server, tmp_path):
    with serve_openssh(tmp_path / "openssh", more_config=server) as openssh:
        (tmp_path / "openssh" / ".bashrc").write_text("echo go away; exit 3\n")
        options = written(tmp_path / "config", openssh.host_config(["alpha"]))
        async with open_ssh_loop():
            connection = await connect(ALPHA, options)
            with pytest.raises(trio.BrokenResourceError, match=r"login shell runs no command .* printed 'go away'"):
                await connection.run("true", timeout_s=10)
            await connection.aclose()


@pytest.mark.parametrize("server", SERVERS)
async def test_a_megabyte_passes_through_a_command_unharmed(server, tmp_path):
    data = os.urandom(1 << 20)
    async with reach(server, tmp_path) as reachable:
        done = await reachable.connection.run("cat", stdin=data, timeout_s=20)
        assert done.exit_status == 0
        assert done.stdout == data


@pytest.mark.parametrize("server", SERVERS)
async def test_a_command_that_is_killed_has_no_clean_status(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        done = await reachable.connection.run("kill -9 $$", timeout_s=10)
        assert done.exit_status not in (0, None)


@pytest.mark.parametrize("server", SERVERS)
async def test_commands_run_side_by_side_on_one_connection(server, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    async with reach(server, tmp_path) as reachable, trio.open_nursery() as nursery:
        nursery.start_soon(partial(reachable.connection.run, f"echo over > {tmp_path}/pipe", timeout_s=10))
        done = await reachable.connection.run(f"cat {tmp_path}/pipe", timeout_s=10)
        assert done.stdout == b"over\n"


@pytest.mark.parametrize("server", SERVERS)
async def test_a_command_in_the_background_outlives_its_connection(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        done = await reachable.connection.run("setsid sleep 60 </dev/null >/dev/null 2>&1 & echo $!", timeout_s=10)
    process = psutil.Process(int(done.stdout))
    await until(lambda: process.cmdline() == ["sleep", "60"])
    process.kill()


def with_words(*words: str) -> list[psutil.Process]:
    """Living processes whose command line holds these words, one after the other."""
    return [one for one in psutil.process_iter(["cmdline"]) if " ".join(words) in " ".join(one.info["cmdline"] or ())]


@pytest.mark.parametrize("server", SERVERS)
async def test_a_slow_command_is_ended_and_leaves_no_channel(server, tmp_path):
    if server == "openssh" and os.getuid() == 0:
        pytest.skip("OpenSSH passes no signals on to commands of root")
    slow = ("sleep", f"3{os.getpid()}")
    async with reach(server, tmp_path) as reachable:
        # OpenSSH allows ten sessions a connection: those that were left open would be missed here.
        for number in range(12):
            begun = tmp_path / f"begun{number}"
            async with trio.open_nursery() as nursery:
                command = f"touch {begun}; {' '.join(slow)}; true"
                nursery.start_soon(partial(reachable.connection.run, command, timeout_s=30))
                await until(begun.exists)
                await reachable.ask_something()  # the server has told that it began before it answers this
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        assert not reachable.connection.is_lost
        with pytest.raises(trio.TooSlowError):
            await reachable.connection.run(f"{' '.join(slow)}; true", timeout_s=0.5)
        # Where the time was over before the command began, it cost the connection.
        await until(lambda: reachable.connection.is_lost or not with_words(*slow))


@pytest.mark.parametrize("server", SERVERS)
async def test_one_who_is_cancelled_before_a_command_has_begun_leaves_no_half_open_channel(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        with trio.move_on_after(0) as scope:
            await reachable.connection.run("true", timeout_s=30)
        assert scope.cancelled_caught
        assert reachable.connection.is_lost, "at once: who needs the node meanwhile must get another"
        again = await connect(reachable.node, reachable.options)
        assert (await again.run("echo fine", timeout_s=5)).stdout == b"fine\n"
        await again.aclose()


@pytest.mark.parametrize("server", SERVERS)
async def test_a_command_whose_connection_is_lost_has_not_ended(server, tmp_path):
    async with reach(server, tmp_path) as reachable, trio.open_nursery() as nursery:

        async def lose_connection():
            await trio.sleep(0.2)
            await reachable.connection.aclose()

        nursery.start_soon(lose_connection)
        with pytest.raises(trio.BrokenResourceError):
            await reachable.connection.run("sleep 2", timeout_s=30)
        with pytest.raises(trio.BrokenResourceError):
            await reachable.connection.run("true", timeout_s=30)


# --- sockets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", SERVERS)
async def test_a_socket_that_nobody_listens_on_is_refused(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        with pytest.raises(trio.BrokenResourceError, match=r"nobody\.sock.*AllowStreamLocalForwarding"):
            await reachable.connection.open_unix(str(tmp_path / "nobody.sock"))
        assert (await reachable.connection.run("echo fine", timeout_s=5)).stdout == b"fine\n"


@pytest.mark.parametrize("server", SERVERS)
async def test_reading_can_be_cancelled_and_loses_nothing(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        stream, owner = await reachable.stream_pair(tmp_path)
        async with stream, owner:
            for piece in (b"one", b"two"):
                with trio.move_on_after(0.05):
                    await stream.receive_some()
                await owner.send_all(piece)
                assert await stream.receive_some() == piece


@pytest.mark.parametrize("server", SERVERS)
async def test_the_owner_of_a_socket_sees_that_the_client_closed_it(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        stream, owner = await reachable.stream_pair(tmp_path)
        async with owner:
            await stream.aclose()
            with trio.fail_after(30):
                assert await owner.receive_some() == b""


@pytest.mark.parametrize("server", SERVERS)
async def test_the_streams_of_a_closed_connection_break(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        stream, owner = await reachable.stream_pair(tmp_path)
        async with owner:
            await reachable.connection.aclose()
            assert reachable.connection.is_lost
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(b"x")


@needs_openssh
async def test_a_killed_server_is_noticed_at_once(openssh: OpenSSH, tmp_path):
    options = written(tmp_path / "config", openssh.host_config(["alpha"]))
    async with open_ssh_loop(), trio.open_nursery() as nursery:
        connection = await connect(ALPHA, options)
        path = tmp_path / "s.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            stream = await connection.open_unix(str(path))

            async def kill(noticing: trio.CancelScope) -> None:
                await trio.testing.wait_all_tasks_blocked()
                openssh.kill_sessions()
                noticing.deadline = trio.current_time() + NOTICED_S

            with trio.fail_after(10) as noticing:
                nursery.start_soon(kill, noticing)
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
        await until(lambda: connection.is_lost)
        await connection.aclose()


@needs_openssh
async def test_a_server_that_forwards_no_sockets_is_told_what_to_change(tmp_path):
    with serve_openssh(tmp_path / "openssh", more_config="AllowTcpForwarding no") as openssh:
        options = written(tmp_path / "config", openssh.host_config(["alpha"]))
        async with open_ssh_loop():
            connection = await connect(ALPHA, options)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(tmp_path / "s.sock"))
                listener.listen(1)
                with pytest.raises(trio.BrokenResourceError, match="AllowTcpForwarding"):
                    await connection.open_unix(str(tmp_path / "s.sock"))
            await connection.aclose()


STRICT = "MaxStartups 10"
"""Where OpenSSH by default begins to turn some away by chance, all are."""

NAMES = [f"n{number:02}" for number in range(16)]


async def reach_all(options: SSHOptions) -> list[str]:
    """Connect to all of `NAMES` at once; returns who let us in."""
    let_in: list[str] = []

    async def reach_one(name: str) -> None:
        connection = await connect(NodeSpec(name=name, host=name), options)
        let_in.append(name)
        await connection.aclose()

    async with trio.open_nursery() as nursery:
        for name in NAMES:
            nursery.start_soon(reach_one, name)
    return sorted(let_in)


@needs_openssh
@pytest.mark.alone  # a server on a busy machine has more logins in progress, and turns others away
async def test_many_nodes_on_one_machine_can_be_reached_at_once(tmp_path):
    with serve_openssh(tmp_path / "openssh", more_config=STRICT) as openssh:
        async with open_ssh_loop():
            assert await reach_all(written(tmp_path / "config", openssh.host_config(NAMES))) == NAMES


@needs_openssh
@pytest.mark.alone
async def test_many_nodes_behind_a_jump_host_can_be_reached_at_once(tmp_path):
    with (
        serve_openssh(tmp_path / "jump", more_config=STRICT) as jump,
        serve_openssh(tmp_path / "behind", more_config=f"MaxStartups {len(NAMES)}") as behind,
    ):
        nodes = behind.host_config(NAMES) + "  ProxyJump jump"
        async with open_ssh_loop():
            assert await reach_all(written(tmp_path / "config", jump.host_config(["jump"]), nodes)) == NAMES


@needs_openssh
@pytest.mark.parametrize("how", ["ProxyJump jump", "ProxyCommand ssh -F {config} -W %h:%p jump"])
async def test_a_node_that_another_host_reaches_for_us_is_known_by_the_name_it_has_there(how: str, openssh, tmp_path):
    config = tmp_path / "config"
    with serve_openssh(tmp_path / "behind") as behind:
        node = behind.host_config(["alpha"]) + f"  {how.format(config=config)}"
        options = written(config, openssh.host_config(["jump"]), node.replace("127.0.0.1", "localhost"))
        behind.known_hosts.write_text(behind.known_hosts.read_text().replace("127.0.0.1", "localhost"))
        async with open_ssh_loop():
            connection = await connect(ALPHA, options)
            assert connection.peer_address == "localhost"
            assert not connection.takes_calls, "others may not reach it as we do"
            assert (await connection.run("echo fine", timeout_s=5)).stdout == b"fine\n"
            await connection.aclose()
    assert "Accepted publickey" in openssh.log


@needs_openssh
async def test_known_hosts_of_thousands_are_not_parsed_for_each_connection_nor_for_its_jump_host(openssh, tmp_path):
    """asyncssh alone parses them twice for a node behind a jump host: for both."""
    key = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    others = "".join(f"node{number} {key}" for number in range(20_000))
    with serve_openssh(tmp_path / "behind") as behind:
        node = behind.host_config(["alpha"]) + "  ProxyJump jump"
        options = written(tmp_path / "config", openssh.host_config(["jump"]), node)
        for server in (openssh, behind):
            server.known_hosts.write_text(server.known_hosts.read_text() + others)
        began_s = time.process_time()
        asyncssh.read_known_hosts(str(behind.known_hosts))
        parsing_s = time.process_time() - began_s
        async with open_ssh_loop():
            await (await connect(ALPHA, options)).aclose()
            began_s = time.process_time()
            for _ in range(3):
                await (await connect(ALPHA, options)).aclose()
            connecting_s = time.process_time() - began_s
    assert connecting_s < 2 * parsing_s, "six connections, with their cryptography, cost less than two readings"


@needs_openssh
async def test_a_jump_host_whose_key_is_not_known_lets_nobody_through(openssh, tmp_path):
    with serve_openssh(tmp_path / "behind") as behind:
        node = behind.host_config(["alpha"]) + "  ProxyJump jump"
        options = written(tmp_path / "config", openssh.host_config(["jump"]), node)
        openssh.known_hosts.write_text("")
        async with open_ssh_loop():
            assert "host key" in await unreachable(ALPHA, options)


@needs_openssh
async def test_a_proxy_command_that_ends_costs_its_own_connection_alone(openssh, tmp_path):
    config = tmp_path / "config"
    through = openssh.host_config(["alpha"]) + f"  ProxyCommand ssh -F {config} -W %h:%p jump"
    options = written(config, openssh.host_config(["jump"]), through)
    before = {*psutil.Process().children()}
    async with open_ssh_loop():
        lost, other = await connect(ALPHA, options), await connect(ALPHA, options)
        commands = {*psutil.Process().children()} - before
        assert len(commands) == 2
        min(commands, key=psutil.Process.create_time).kill()
        with pytest.raises(trio.BrokenResourceError):
            await lost.run("sleep 30", timeout_s=20)
        assert (await other.run("echo fine", timeout_s=5)).stdout == b"fine\n"
        await lost.aclose()
        await other.aclose()
    assert not [command for command in commands if command.is_running()]


@needs_openssh
async def test_a_server_that_is_asked_by_too_many_is_told_apart(tmp_path):
    with serve_openssh(tmp_path / "openssh", more_config="MaxStartups 1") as openssh:
        options = written(tmp_path / "config", openssh.host_config(["alpha"]))
        with socket.create_connection((openssh.host, openssh.port)) as somebody:
            assert somebody.recv(7) == b"SSH-2.0"
            async with open_ssh_loop():
                reason = await unreachable(ALPHA, options)
    assert "closed the connection" in reason
    assert "MaxStartups" in reason


# --- who is let in, and who is trusted -----------------------------------------------------------------------------


@needs_openssh
@pytest.mark.parametrize(
    ("lines", "cipher"),
    [((), "aes128-gcm@openssh.com"), (("  Ciphers aes256-ctr",), "aes256-ctr")],
    ids=("ours", "theirs"),
)
async def test_packets_take_the_cheapest_cipher_unless_the_config_names_others(lines, cipher, home: Path, tmp_path):
    with serve_openssh(tmp_path / "openssh", more_config="LogLevel DEBUG1") as openssh:
        async with open_ssh_loop():
            connection = await connect(ALPHA, written(tmp_path / "config", openssh.host_config(["alpha"]), *lines))
            assert (await connection.run("true", timeout_s=5)).exit_status == 0
            await connection.aclose()
        for direction in ("client->server", "server->client"):
            assert f"kex: {direction} cipher: {cipher} " in openssh.log


@needs_openssh
async def test_an_unknown_host_key_is_refused_with_the_command_that_adds_it(openssh: OpenSSH, home: Path):
    node = NodeSpec(name="n", host="127.0.0.1", port=openssh.port, user="somebody")
    async with open_ssh_loop():
        reason = await unreachable(node, SSHOptions(client_keys=(openssh.client_key,)))
    assert f"{home}/.ssh/known_hosts" in reason
    assert f"`ssh -p {openssh.port} somebody@127.0.0.1`" in reason


@needs_openssh
async def test_a_changed_host_key_is_refused_with_a_warning(openssh: OpenSSH, tmp_path):
    make_key(tmp_path / "other")
    key = (tmp_path / "other.pub").read_text()
    openssh.known_hosts.write_text(f"[127.0.0.1]:{openssh.port} {key}")
    options = written(tmp_path / "config", openssh.host_config(["alpha"]))
    async with open_ssh_loop():
        reason = await unreachable(ALPHA, options)
    assert "host key" in reason
    assert "ssh-keygen -R" in reason


@needs_openssh
async def test_the_global_known_hosts_count_too_and_missing_files_do_not_harm(openssh: OpenSSH, home: Path, tmp_path):
    config = openssh.host_config(["alpha"]).replace("UserKnownHostsFile", "GlobalKnownHostsFile /nonexistent")
    async with open_ssh_loop():
        connection = await connect(ALPHA, written(tmp_path / "config", config))
        await connection.aclose()


@needs_openssh
async def test_the_users_own_config_keys_and_known_hosts_are_the_default(openssh: OpenSSH, home: Path):
    (home / ".ssh" / "config").write_text(f"Host alpha\n  HostName 127.0.0.1\n  Port {openssh.port}\n")
    shutil.copy(openssh.known_hosts, home / ".ssh" / "known_hosts")
    shutil.copy(openssh.client_key, home / ".ssh" / "id_ed25519")
    async with open_ssh_loop():
        connection = await connect(ALPHA, SSHOptions())
        assert connection.peer_address == "127.0.0.1"
        assert (await connection.run("id -u", timeout_s=5)).stdout.decode().strip() == str(os.getuid())
        await connection.aclose()


@needs_openssh
async def test_a_port_in_the_hostfile_counts_more_than_the_one_in_the_config(openssh: OpenSSH, tmp_path):
    options = written(tmp_path / "config", openssh.host_config(["alpha"]).replace(str(openssh.port), "1", 1))
    async with open_ssh_loop():
        connection = await connect(NodeSpec(name="alpha", host="alpha", port=openssh.port), options)
        await connection.aclose()


@needs_openssh
async def test_a_wrong_client_key_is_refused(openssh: OpenSSH, home: Path, tmp_path):
    make_key(tmp_path / "other")
    config = openssh.host_config(["alpha"]).replace(str(openssh.client_key), str(tmp_path / "other"))
    async with open_ssh_loop():
        reason = await unreachable(ALPHA, written(tmp_path / "config", config))
    assert "none of the keys" in reason
    assert "authorized_keys" in reason


async def test_the_embedded_server_lets_only_the_key_of_its_run_in():
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options):
        assert options.host_keys is not None
        wrong = SSHOptions(client_keys=(stranger,), host_keys=options.host_keys, use_defaults=False)
        assert "none of the keys" in await unreachable(node, wrong)
        other = SSHOptions(
            client_keys=options.client_keys, host_keys=(stranger.convert_to_public(),), use_defaults=False
        )
        assert "not the pinned one" in await unreachable(node, other)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["Port never"], "ssh's own files cannot be used.*never"),
        (["IdentityFile broken"], "ssh's own files cannot be used"),
        (["IdentityFile /nonexistent/key"], "/nonexistent/key"),
    ],
)
async def test_what_is_wrong_in_sshs_files_is_said(lines, complaint, home: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_text("no key")
    async with open_ssh_loop():
        node = NodeSpec(name="n", host="127.0.0.1", port=free_port())
        with pytest.raises(NodeUnreachable, match=complaint):
            await connect(node, written(tmp_path / "config", *lines))


# --- hosts that are not there --------------------------------------------------------------------------------------


async def test_a_port_that_nobody_listens_on_is_refused(home: Path):
    port = free_port()
    async with open_ssh_loop():
        reason = await unreachable(NodeSpec(name="n", host="127.0.0.1", port=port), SSHOptions())
    assert f"127.0.0.1:{port} " in reason


async def test_a_name_that_does_not_exist_is_said_to_be_wrong(home: Path):
    async with open_ssh_loop():
        reason = await unreachable(NodeSpec(name="n", host="no-such-host.invalid"), SSHOptions())
    assert "'no-such-host.invalid'" in reason


@contextmanager
def listening(*, says: bytes = b""):
    """A port that takes connections, and never says more than this."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


async def test_a_host_that_never_answers_is_given_up_in_time(home: Path):
    with listening() as port:
        began_s = time.monotonic()
        async with open_ssh_loop():
            node = NodeSpec(name="n", host="127.0.0.1", port=port)
            reason = await unreachable(node, SSHOptions(connect_timeout_s=0.5))
        assert " 0.5 s" in reason
        assert 0.5 <= time.monotonic() - began_s < 2.5


async def test_connecting_can_be_cancelled_and_leaves_no_connection(home: Path):
    with listening() as port:
        began_s = time.monotonic()
        async with open_ssh_loop():
            with trio.move_on_after(0.3) as scope:
                await connect(NodeSpec(name="n", host="127.0.0.1", port=port), SSHOptions(connect_timeout_s=30))
            assert scope.cancelled_caught
        assert time.monotonic() - began_s < 10
        connections = psutil.Process().net_connections(kind="tcp")
        assert not [one for one in connections if one.raddr and one.raddr.port == port]


async def test_a_cancellation_is_repeated_until_it_is_heard():
    times = []

    async def deaf() -> None:
        while len(times) < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                times.append(time.monotonic())
        await asyncio.sleep(60)

    async with open_ssh_loop():
        with trio.move_on_after(0.1) as scope:
            await await_asyncio(deaf)
    assert scope.cancelled_caught
    assert len(times) == 3


async def test_what_ends_in_spite_of_a_cancellation_is_not_lost():
    async def ends_anyway(outcome: BaseException | None) -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        if outcome is not None:
            raise outcome
        return "a connection that is to be closed"

    async with open_ssh_loop():
        with trio.move_on_after(0.1):
            assert await await_asyncio(ends_anyway, None) == "a connection that is to be closed"
        with trio.move_on_after(0.1), pytest.raises(OSError, match="no route"):
            await await_asyncio(ends_anyway, OSError("no route"))


async def test_configs_that_cannot_be_read_outlast_no_timeout_and_hold_up_no_other_login(home: Path, tmp_path):
    config = tmp_path / "config"
    os.mkfifo(config)  # opening it waits for a writer, as a file of a network disk may wait for its server
    reasons = []

    async def reach_in_vain() -> None:
        reasons.append(await unreachable(ALPHA, SSHOptions(config=config, connect_timeout_s=0.5)))

    began_s = time.monotonic()
    async with open_ssh_loop():
        async with trio.open_nursery() as nursery:
            for _ in range(48):  # trio's own limit of threads is 40
                nursery.start_soon(reach_in_vain)
        took_s = time.monotonic() - began_s
        refused = await unreachable(NodeSpec(name="n", host="127.0.0.1", port=free_port()), SSHOptions())
    with suppress(OSError):
        os.close(os.open(config, os.O_WRONLY | os.O_NONBLOCK))  # the abandoned threads end
    assert len(reasons) == 48
    assert all(" 0.5 s" in reason for reason in reasons)
    assert 0.5 <= took_s < 10
    assert "refused" in refused


async def test_one_that_speaks_no_ssh_is_named():
    async with open_ssh_loop(), trio.open_nursery() as nursery:

        async def babble(stream):
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50)
            await stream.aclose()

        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, babble, [listener])
        port = listener.socket.getsockname()[1]
        reason = await unreachable(NodeSpec(name="n", host="127.0.0.1", port=port), SSHOptions(use_defaults=False))
        assert f"127.0.0.1:{port}" in reason
        nursery.cancel_scope.cancel()

"""Known hosts are what ssh finds in the files: the keys of a host's own names, and of no address."""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.runtime.ssh.asyncssh_adapter import open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions, connect
from oobleck.runtime.ssh.known_hosts import HostKeyFiles
from tests.openssh import OpenSSH, needs_openssh, serve_openssh

KEYS = [asyncssh.generate_private_key("ssh-ed25519").convert_to_public() for _ in range(8)]
WORDS = [" ".join(key.export_public_key().decode().split()[:2]) for key in KEYS]


def hashed(name: str) -> str:
    """A name as `ssh-keygen -H` writes it."""
    salt = os.urandom(20)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


LINES = [
    "# a comment",
    "",
    f"alpha,10.0.0.1 {WORDS[0]}",
    f"  {hashed('beta')} {WORDS[1]} comment",
    f"{hashed('10.0.0.2')} {WORDS[2]}",
    f"[alpha]:2222 {WORDS[3]}",
    f"{hashed('[beta]:2222')} {WORDS[4]}",
    f"*.cluster,!bad.cluster {WORDS[5]}",
    f"@cert-authority *.cluster {WORDS[6]}",
    f"@cert-authority alpha {WORDS[6]}",
    f"@revoked * {WORDS[7]}",
    f"@revoked {hashed('beta')} {WORDS[0]}",
    "alpha ssh-unknown AAAAB3",
    f"alpha {WORDS[1]}",
]


def names(host: str, port: int | None = None) -> list[str]:
    """The names that a host has in the files."""
    return [host] if port is None else [f"[{host}]:{port}", host]


@pytest.mark.parametrize("port", [None, 2222, 2200])
@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.2", "192.168.0.1"])
@pytest.mark.parametrize("host", ["alpha", "beta", "good.cluster", "bad.cluster", "10.0.0.2", "nobody"])
def test_every_host_has_the_keys_that_asyncssh_alone_would_find_for_its_name(
    tmp_path: Path, host: str, address: str, port: int | None
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    paths[0].write_text("\n".join(LINES[:8]) + "\n")
    paths[1].write_text("\n".join(LINES[8:]) + "\n")
    expected = asyncssh.read_known_hosts([str(path) for path in paths]).match(host, "", port)
    assert HostKeyFiles().trusted(paths, names(host, port)).match(host, address, port) == expected


@pytest.mark.parametrize(
    "line",
    ["alpha", "@nonsense alpha key", f"|1|salt {WORDS[0]}", f"|2|c2FsdA==|aGFzaA== {WORDS[0]}"],
    ids=["no key", "unknown marker", "no hash", "unknown hash"],
)
def test_a_broken_line_is_passed_over_as_by_ssh(tmp_path: Path, line: str) -> None:
    path = tmp_path / "known_hosts"
    path.write_bytes(f"{line}\nbeta {WORDS[0]} ".encode() + b"caf\xe9\n")
    assert HostKeyFiles().trusted([path], ["beta"]).match("", "", None)[0] == [KEYS[0]]
    assert HostKeyFiles().trusted([path], ["alpha"]).match("", "", None)[0] == []


@pytest.mark.parametrize(
    ("pattern", "is_for"),
    [
        ("n*.cluster", True),
        ("n?.cluster", True),
        ("N1*.Cluster", True),
        ("n1.cluster.elsewhere", False),
        ("!n1.cluster,*", False),
        ("*,!n1.cluster", False),
        ("!n2.cluster,*", True),
        ("n1[.]cluster*", False),
        ("10.0.0.0/8", False),
        ("*.cluster,n2", True),
        ("!n2.cluster", False),
    ],
)
def test_patterns_mean_what_they_mean_to_ssh(tmp_path: Path, pattern: str, is_for: bool) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"{pattern} {WORDS[0]}\n")
    assert bool(HostKeyFiles().index_of(path).lines_for("n1.cluster")) == is_for


def test_a_key_that_is_revoked_for_the_name_with_the_port_stays_so_where_the_name_alone_has_it(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"@revoked [alpha]:2222 {WORDS[0]}\nalpha {WORDS[0]}\n")
    keys, _, revoked, *_ = HostKeyFiles().trusted([path], names("alpha", 2222)).match("", "", None)
    assert keys == revoked == [KEYS[0]]


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path, files = tmp_path / "known_hosts", HostKeyFiles()
    path.write_text(f"alpha {WORDS[0]}\n")
    index = files.index_of(path)
    assert files.index_of(path) is index
    with path.open("a") as more:
        more.write(f"beta {WORDS[1]}\n")
    assert files.trusted([path], ["beta"]).match("", "", None)[0] == [KEYS[1]]
    replaced = tmp_path / "new"
    replaced.write_text(f"alpha {WORDS[2]}\nbeta {WORDS[1]}\n")
    shutil.copystat(path, replaced)  # of the same size, and of the same age
    replaced.replace(path)
    assert files.trusted([path], ["alpha"]).match("", "", None)[0] == [KEYS[2]]


def test_hosts_that_are_asked_for_in_turn_have_the_keys_that_asyncssh_alone_would_find(tmp_path: Path) -> None:
    """What is known of one host's hashed lines takes no other host's away, and its own stay."""
    path = tmp_path / "known_hosts"
    path.write_text("\n".join(LINES) + f"\n{hashed('beta')} {WORDS[3]}\n")
    files, expected = HostKeyFiles(), asyncssh.read_known_hosts(str(path))
    for host in ("nobody", "beta", "alpha", "beta", "nobody"):
        for port in (None, 2222, 2200):
            known = files.trusted([path], names(host, port))
            assert known.match(host, "10.0.0.2", port) == expected.match(host, "", port)


def processor_s(function: Callable[[], object]) -> float:
    began_s = time.process_time()
    function()
    return time.process_time() - began_s


def test_a_file_of_a_thousand_hosts_is_not_parsed_for_each_of_them(tmp_path: Path) -> None:
    """asyncssh alone takes 200 times as long; a fifth of its time for a few hosts is enough for all of them here."""
    path, hosts = tmp_path / "known_hosts", [f"node{number}" for number in range(1024)]
    path.write_text("".join(f"{host} {WORDS[0]}\n" for host in hosts))
    files = HostKeyFiles()

    def look_up(known: asyncssh.SSHKnownHosts, name: str) -> None:
        assert known.match(name, "10.0.0.1", None)[0] == [KEYS[0]]

    each_s = processor_s(lambda: [look_up(asyncssh.read_known_hosts(str(path)), host) for host in hosts[:8]]) / 8
    all_s = processor_s(lambda: [look_up(files.trusted([path], [host]), host) for host in hosts])
    assert all_s < each_s * len(hosts) / 5


def test_hashed_names_are_looked_for_once(tmp_path: Path) -> None:
    path, hosts = tmp_path / "known_hosts", [f"node{number}" for number in range(256)]
    path.write_text("".join(f"{hashed(host)} {WORDS[0]}\n" for host in hosts))
    index = HostKeyFiles().index_of(path)
    first_s, again_s = (processor_s(lambda: [index.lines_for(host) for host in hosts]) for _ in range(2))
    assert again_s < first_s / 3  # of 256 hosts a fiftieth
    assert all(len(index.lines_for(host)) == 1 for host in hosts)


@pytest.fixture
def openssh(tmp_path: Path) -> Iterator[OpenSSH]:
    with serve_openssh(tmp_path / "openssh") as openssh:
        yield openssh


@needs_openssh
async def test_keys_that_are_added_or_revoked_meanwhile_count_at_the_next_connection(
    openssh: OpenSSH, tmp_path: Path
) -> None:
    """Among those of thousands of hosts, most of them hashed."""
    config = tmp_path / "config"
    config.write_text(openssh.host_config(["alpha"]))
    node, options = NodeSpec(name="alpha", host="alpha"), SSHOptions(config=config, use_defaults=False)
    line = openssh.known_hosts.read_text()
    _, key = line.split(None, 1)
    others = "".join(f"{hashed(f'node{number}')} {WORDS[number % 8]}\n" for number in range(2000))
    async with open_ssh_loop():
        openssh.known_hosts.write_text(others)
        with pytest.raises(NodeUnreachable, match="is not in"):
            await connect(node, options)
        openssh.known_hosts.write_text(others + f"{hashed(f'[127.0.0.1]:{openssh.port}')} {key}")
        await (await connect(node, options)).aclose()
        with openssh.known_hosts.open("a") as more:
            more.write(f"@revoked * {key}")
        with pytest.raises(NodeUnreachable):
            await connect(node, options)

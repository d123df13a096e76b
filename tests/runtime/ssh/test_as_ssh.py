"""Whom ssh connects to, Oobleck connects to, and nobody else: both read the same files against real servers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.runtime.ssh.asyncssh_adapter import open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions, connect
from tests.openssh import OpenSSH, needs_openssh, serve_openssh

pytestmark = [needs_openssh, pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")]


@dataclass(frozen=True)
class Place:
    """Two servers, and the files by which `alpha` is the first of them."""

    directory: Path
    server: OpenSSH
    other: OpenSSH

    @property
    def names(self) -> dict[str, str]:
        """What may be written in configs and known_hosts."""
        key, other_key = ((each.directory / "host_key.pub").read_text().strip() for each in (self.server, self.other))
        jump = f"127.0.0.1:{self.other.port}"
        return {"port": str(self.server.port), "key": key, "other": other_key, "jump": jump}

    def config(self, *, lines: str, known: str, host: str) -> Path:
        """Write the files. `lines` come first, for the first word on an option counts."""
        known_hosts, config = self.directory / "known", self.directory / "config"
        jump = f"[127.0.0.1]:{self.other.port} {self.names['other']}\n"
        known_hosts.write_text(jump + known.format(**self.names) + "\n")
        files = f"  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile none\n"
        config.write_text(
            f"Host alpha\n  {lines.format(**self.names)}\n"
            f"Host alpha\n  HostName {host}\n  Port {self.server.port}\n"
            f"  IdentityFile {self.server.client_key}\n{files}"
            f"Host *\n  IdentityFile {self.other.client_key}\n{files}"
        )
        return config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("as-ssh")
    banner = directory / "banner"
    banner.write_bytes("Grüße\n".encode("latin-1"))
    with (
        serve_openssh(directory / "one", more_config=f"Banner {banner}") as one,
        serve_openssh(directory / "two") as two,
    ):
        yield Place(directory, one, two)


def ssh_connects(config: Path) -> bool:
    command = ["ssh", "-F", str(config), "-oBatchMode=yes", "alpha", "true"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


async def refusal(config: Path) -> str:
    """Why Oobleck does not connect; empty where it does, and a command runs."""
    async with open_ssh_loop():
        try:
            connection = await connect(NodeSpec(name="alpha", host="alpha"), SSHOptions(config=config))
        except NodeUnreachable as error:
            return error.reason
        assert (await connection.run("true", timeout_s=10)).exit_status == 0
        await connection.aclose()
        return ""


RIGHT = "[127.0.0.1]:{port} {key}"


@pytest.mark.parametrize(
    "lines", ["StrictHostKeyChecking accept-new", "StrictHostKeyChecking off\n  HashKnownHosts yes"]
)
async def test_an_unknown_host_is_added_where_ssh_would_add_it_and_another_key_is_refused_then(
    place: Place, lines: str
) -> None:
    config = place.config(lines=lines, known="", host="127.0.0.1")
    known = place.directory / "known"
    assert await refusal(config) == ""
    (added,) = [line for line in known.read_text().splitlines() if place.names["key"].split()[1] in line]
    assert ("127.0.0.1" in added) == ("Hash" not in lines)
    assert ssh_connects(place.config(lines="StrictHostKeyChecking yes", known=added, host="127.0.0.1"))
    assert await refusal(config) == ""
    assert known.read_text().count(place.names["key"].split()[1]) == 1
    place.config(
        lines=lines,
        known=added.replace(place.names["key"].split()[1], place.names["other"].split()[1]),
        host="127.0.0.1",
    )
    assert "shows another host key" in await refusal(config)


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        ("StrictHostKeyChecking accept-new\n  UserKnownHostsFile none", ""),
        ("StrictHostKeyChecking accept-new", "@revoked * {key}"),
        ("StrictHostKeyChecking accept-new", "[127.0.0.1]:{port} {other}"),
        ("Match host nosuch\n  StrictHostKeyChecking no", ""),
        ("Match exec true\n  StrictHostKeyChecking no", ""),
    ],
)
async def test_an_unknown_host_is_accepted_by_the_lines_by_which_ssh_accepts_it(
    place: Place, lines: str, known: str
) -> None:
    config = place.config(lines=lines, known=known, host="127.0.0.1")
    assert (await refusal(config) == "") == ssh_connects(config)


@pytest.mark.parametrize(
    ("known", "host", "lines"),
    [
        (RIGHT, "127.0.0.1", ""),
        ("", "127.0.0.1", ""),
        ("[127.0.0.1]:{port} {other}", "127.0.0.1", ""),
        ("127.0.0.1 {key}", "127.0.0.1", ""),
        ("127.0.0.1 {key}\n[127.0.0.1]:{port} {other}", "127.0.0.1", ""),
        ("[127.0.0.1]:{port} {other}\n[127.0.0.1]:{port} {key}", "127.0.0.1", ""),
        ("[localhost]:{port} {key}", "LOCALHOST", ""),
        ("[LOCALHOST]:{port} {key}", "localhost", ""),
        (RIGHT, "localhost", ""),
        ("[localhost]:{port} {other}\n" + RIGHT, "localhost", ""),
        ("[localhost]:{port} {key}\n[127.0.0.1]:{port} {other}", "localhost", ""),
        ("[localhost]:{port} {key}\n[127.0.0.1]:{port} {other}", "localhost", "CheckHostIP yes"),
        (RIGHT, "127.0.0.1", "HostKeyAlias foo"),
        ("foo {key}", "127.0.0.1", "HostKeyAlias foo"),
        ("[foo]:{port} {key}", "127.0.0.1", "HostKeyAlias foo"),
        ("foo {other}\n" + RIGHT, "127.0.0.1", "HostKeyAlias foo"),
        (RIGHT + "\n@revoked [127.0.0.1]:{port} {key}", "127.0.0.1", ""),
        (RIGHT + "\n@revoked * {key}", "127.0.0.1", ""),
        (RIGHT + "\n@revoked 127.0.0.1 {key}", "127.0.0.1", ""),
        ("[127.0.0.*]:{port} {key}", "127.0.0.1", ""),
        ("127.0.0.? {key}", "127.0.0.1", ""),
        ("![127.0.0.1]:{port},* {key}", "127.0.0.1", ""),
        ("127.0.0.0/8 {key}", "127.0.0.1", ""),
        ("nonsense\n@nonsense a b\n|1|x|y {key}\n" + RIGHT, "127.0.0.1", ""),
        (RIGHT, "127.0.0.1", "UserKnownHostsFile none"),
        (RIGHT, "127.0.0.1", "UserKnownHostsFile /nonexistent"),
    ],
)
async def test_host_keys_are_trusted_where_ssh_trusts_them(place: Place, known: str, host: str, lines: str) -> None:
    config = place.config(lines=lines, known=known, host=host)
    assert (await refusal(config) == "") == ssh_connects(config)


CONFIGS = [
    "IdentityFile /nonexistent",
    "CertificateFile /nonexistent",
    "RequestTTY force",
    "ProxyJump {jump}",
    "ProxyJump ssh://{jump}",
    "ProxyJump ssh://{jump}/",
    "ProxyJump none",
    "ProxyJump nosuch.invalid",
    "ProxyCommand false",
    "HostKeyAlgorithms ssh-rsa",
    "HostKeyAlgorithms +ssh-rsa",
    "Port abc",
]
MORE_CONFIGS = [
    "IdentityFile ~/none-%u",
    'IdentityFile "/nonexistent file"',
    "IdentitiesOnly yes",
    "IdentityAgent none",
    "HostKeyAlgorithms -ssh-ed25519",
    "HostKeyAlgorithms ssh-ed25519-cert-v01@openssh.com",
    "KexAlgorithms +diffie-hellman-group1-sha1",
    "Ciphers nosuch",
    "Ciphers aes128-ctr",
    "MACs +hmac-md5",
    "ProxyCommand /nonexistent",
    "Hostname %h.invalid",
    "BindAddress 192.0.2.1",
    "AddressFamily inet6",
    "Match exec true",
    "Include /nonexistent",
    "ControlMaster auto",
    "PubkeyAuthentication no",
    "PreferredAuthentications publickey",
    "StrictHostKeyChecking yes",
    "IgnoreUnknown Nonsense\n  Nonsense yes",
    "CanonicalizeHostname yes",
    "ForwardAgent yes",
    "SendEnv LANG LC_*",
    "LogLevel DEBUG",
    "ConnectTimeout 1",
]


@pytest.mark.parametrize("lines", [*CONFIGS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_CONFIGS)])
async def test_a_config_reaches_what_ssh_reaches_by_it(place: Place, lines: str) -> None:
    config = place.config(lines=lines, known=RIGHT, host="127.0.0.1")
    assert (await refusal(config) == "") == ssh_connects(config)


@pytest.mark.parametrize(
    ("lines", "known", "words"),
    [
        ("StrictHostKeyChecking ask", "", "or set `StrictHostKeyChecking accept-new` for it"),
        ("StrictHostKeyChecking no", "[127.0.0.1]:{port} {other}", "shows another host key"),
        ("HostKeyAlias foo", RIGHT, "where it has the name foo"),
        ("UserKnownHostsFile none", RIGHT, "names no known_hosts file"),
        ("HostKeyAlgorithms ssh-rsa", RIGHT, "none of the algorithms that ssh's config asks for (HostKeyAlgorithms)"),
        ("ProxyJump nosuch.invalid", RIGHT, "'nosuch.invalid' cannot be resolved"),
        ("ProxyCommand false", RIGHT, "ProxyCommand `false` of ssh's config"),
        ("ProxyCommand true", RIGHT, "ProxyCommand `true` of ssh's config"),
        ("ProxyJump a:b", RIGHT, "ProxyJump: 'a:b' is not [USER@]HOST[:PORT]"),
    ],
)
async def test_what_ssh_would_not_refuse_or_would_name_is_named(
    place: Place, lines: str, known: str, words: str
) -> None:
    assert words in await refusal(place.config(lines=lines, known=known, host="127.0.0.1"))

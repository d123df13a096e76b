"""Hostfiles: the nodes of a job, one a line, in the style of DeepSpeed and MPI.

    # two machines with all their devices, and half of a third
    node1 slots=4
    user@node[2-3] slots=4 port=2222
    30.207.99.20 devices=0-3

A line is a host, then `key=value` words: `slots` (how many devices), `devices` (which ones), `device` (what they are,
where nodes have different ones), `port` (of SSH), `domain` (of nodes that may fail together), and `address` (where
training's own traffic goes, see below).
Brackets hold numbers and ranges, with their leading zeros: node[08-11,20]. A host may appear again with other devices;
without `devices=` it gets those that follow the ones already taken.

Tensors do not go through SSH. Process groups listen at the address by which SSH reached the node, unless `address=`
names another of the node's addresses, or one of its network interfaces:

    node[1-4] address=10.0.0.[1-4]
    node[5-8] address=ib0

A domain's brackets name one domain for each host, too: node[1-4] domain=rack[1,1,2,2].
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain, product, takewhile, zip_longest
from math import prod

from oobleck.errors import ConfigError
from oobleck.job import DEFAULT_KIND, MAX_DEVICES, MAX_KINDS, MAX_NODES, NodeSpec, check_kind_name

from .values import did_you_mean

_KEYS = ("slots", "devices", "device", "port", "address", "domain")
_SSH_PORT = 22
_NUMBER = re.compile(r"[0-9]{1,9}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")
_USER = re.compile(r"[\w.][\w.@\\+$-]*")


def parse_hostfile(text: str, *, source: str) -> tuple[NodeSpec, ...]:
    """Read the nodes of a hostfile, in its order.

    Raises ConfigError, beginning with "source:line:", that names the value and what to change.
    """
    taken = _Taken()
    nodes: list[NodeSpec] = []
    kinds: set[str] = set()
    # `splitlines` would also split at form feeds and the like, where editors count no line.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        try:
            entry = _parse_line(line)
            if entry is None:
                continue
            if len(nodes) + len(entry.hosts) > MAX_NODES:
                raise ConfigError(f"names more than {MAX_NODES} nodes; check the ranges in brackets")
            for host, address, domain in zip(entry.hosts, entry.addresses, entry.domains, strict=True):
                nodes.append(taken.place(host, entry, address=address, domain=domain, line=number))
                kinds.add(nodes[-1].kind)
            if len(kinds) > MAX_KINDS:
                raise ConfigError(
                    f"there are {len(kinds)} kinds of nodes by now ({', '.join(sorted(kinds))}); a run may have "
                    f"{MAX_KINDS}, each with its device= and its number of devices"
                )
        except ConfigError as error:
            raise ConfigError(f"{source}:{number}: {error}") from error
    return tuple(nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    hosts: tuple[str, ...]
    user: str | None
    port: int | None
    num_devices: int
    devices: tuple[int, ...] | None
    """None takes the next `num_devices` free ones."""
    device: str
    domains: tuple[str, ...]
    """One for each host, like the addresses."""
    addresses: tuple[str | None, ...]


class _Taken:
    """Which devices of which machine earlier lines have taken, and how often each host was named."""

    def __init__(self) -> None:
        # It has the line that took each device, keyed by machine and then by device.
        self._lines: dict[tuple[str, int], dict[int, int]] = {}
        self._times_named: Counter[str] = Counter()

    def place(self, host: str, entry: _Entry, *, address: str | None, domain: str, line: int) -> NodeSpec:
        """Make a node of one host of a line, and take its devices. Raises ConfigError if one is taken already."""
        # Another port of one address is another machine: a container, or a forwarded port. Host names ignore case.
        machine = (host.lower(), entry.port or _SSH_PORT)
        lines = self._lines.setdefault(machine, {})
        first = max(lines, default=-1) + 1
        devices = entry.devices or tuple(range(first, first + entry.num_devices))
        for device in devices:
            if device in lines:
                raise ConfigError(
                    f"device {device} of {host} is taken by line {lines[device]} already; give each line "
                    f"devices= of its own, or none at all"
                )
            if device >= MAX_DEVICES:
                raise ConfigError(f"device {device} of {host} is not possible; it must be less than {MAX_DEVICES}")
        lines.update(dict.fromkeys(devices, line))
        self._times_named[host.lower()] += 1
        times = self._times_named[host.lower()]
        name = host if times == 1 else f"{host}#{times}"
        return NodeSpec(
            name=name,
            host=host,
            devices=devices,
            port=entry.port,
            user=entry.user,
            address=address,
            device=entry.device,
            domain=domain,
        )


def _parse_line(line: str) -> _Entry | None:
    # Only a word that begins with # begins a comment.
    words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
    if not words:
        return None
    user, at, pattern = words[0].rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ConfigError(f"{words[0]!r} is not a host; write HOST or USER@HOST")
    settings = _settings(words[1:])
    devices = _devices(settings["devices"]) if "devices" in settings else None
    if "slots" in settings:
        num_devices = _number("slots", settings["slots"], least=1, most=MAX_DEVICES)
    else:
        num_devices = len(devices) if devices else 1
    if devices and len(devices) != num_devices:
        raise ConfigError(
            f"slots={num_devices}, but devices={settings['devices']} names {len(devices)}; make them agree, or leave "
            "slots out"
        )
    hosts = _hosts(pattern)
    return _Entry(
        hosts=hosts,
        user=user or None,
        port=_number("port", settings["port"], least=1, most=65_535) if "port" in settings else None,
        num_devices=num_devices,
        devices=devices,
        device=_device(settings.get("device", DEFAULT_KIND)),
        domains=_domains(settings["domain"], len(hosts)) if "domain" in settings else ("",) * len(hosts),
        addresses=_addresses(settings["address"], len(hosts)) if "address" in settings else (None,) * len(hosts),
    )


def _settings(words: list[str]) -> Mapping[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"{word!r} is not key=value, written without spaces, as in slots=4; one node per line")
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; {did_you_mean(key, _KEYS)}")
        if key in settings:
            raise ConfigError(f"{key} is given twice; leave one of {key}={settings[key]} and {word} out")
        settings[key] = value
    return settings


def _number(key: str, text: str, *, least: int, most: int) -> int:
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise ConfigError(f"{key}={text} is not possible; it must be a whole number from {least} to {most}")
    return int(text)


def _device(name: str) -> str:
    try:
        check_kind_name(name)
    except ConfigError as error:
        hint = f"; devices={name} says which devices a node has" if name.isdecimal() else ""
        raise ConfigError(f"device={name}: {error}{hint}") from error
    return name


def _devices(text: str) -> tuple[int, ...]:
    """Read 0,1,2 or 0-2,5."""
    devices: list[int] = []
    for part in text.split(","):
        first, last = _ends(part, f"devices={text}")
        if last >= MAX_DEVICES:
            raise ConfigError(f"devices={text}: device {last} is not possible; it must be less than {MAX_DEVICES}")
        devices.extend(range(int(first), last + 1))
    if len(set(devices)) != len(devices):
        raise ConfigError(f"devices={text} names a device twice; name each once")
    return tuple(devices)


def _ends(part: str, whole: str) -> tuple[str, int]:
    """Return the first number of `3` or `3-7` as text, with its leading zeros, and the last as a number."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise ConfigError(f"{whole}: {part!r} is neither a number nor a range of them, as in 0,2-5")
    first, last = match[1], int(match[2] or match[1])
    if last < int(first):
        raise ConfigError(f"{whole}: {part} counts down; write {match[2]}-{first}")
    return first, last


def _hosts(pattern: str) -> tuple[str, ...]:
    """Expand the brackets of a host. Raises ConfigError for a bad host, and for one that is named twice."""
    _check_host(pattern)
    hosts = _expand(pattern)
    ((host, times),) = Counter(hosts).most_common(1)
    if times > 1:
        raise ConfigError(f"{pattern} names {host} twice; name each host once, and its devices by slots=")
    return hosts


def _expand(pattern: str) -> tuple[str, ...]:
    # Every second piece is the inside of a pair of brackets.
    pieces = _BRACKETS.split(pattern)
    ranges = [[_ends(part, pattern) for part in piece.split(",")] for piece in pieces[1::2]]
    if prod(sum(last - int(first) + 1 for first, last in parts) for parts in ranges) > MAX_NODES:
        raise ConfigError(f"{pattern} names more than {MAX_NODES} nodes")
    choices = [
        [
            str(number).zfill(len(first)) if first.startswith("0") else str(number)
            for first, last in parts
            for number in range(int(first), last + 1)
        ]
        for parts in ranges
    ]
    return tuple(
        "".join(chain.from_iterable(zip_longest(pieces[::2], numbers, fillvalue=""))) for numbers in product(*choices)
    )


def _domains(text: str, num_hosts: int) -> tuple[str, ...]:
    """Read one domain for each host, or one for all of them."""
    if not {"[", "]"}.isdisjoint(_BRACKETS.sub("", text)):
        raise ConfigError(f"domain={text}: brackets stand in pairs, around numbers, as in domain=rack[1,1,2,2]")
    try:
        domains = _expand(text)
    except ConfigError as error:
        raise ConfigError(f"domain={text}: {error}") from error
    if len(domains) == 1:
        return domains * num_hosts
    if len(domains) != num_hosts:
        raise ConfigError(
            f"domain={text} names {len(domains)} domains for {num_hosts} host{'s' if num_hosts != 1 else ''}; name one "
            "for each, as in node[1-4] domain=rack[1,1,2,2], or one for all"
        )
    return domains


def _addresses(text: str, num_hosts: int) -> tuple[str, ...]:
    """Read one address for each host; the name of an interface may be the same for all of them."""
    try:
        addresses = _hosts(text)
    except ConfigError as error:
        raise ConfigError(f"address={text}: {error}") from error
    if len(addresses) == 1:
        try:
            ip_address(addresses[0])
        except ValueError:  # the name of an interface
            return addresses * num_hosts
    if len(addresses) != num_hosts:
        raise ConfigError(
            f"address={text} names {len(addresses)} address{'es' if len(addresses) != 1 else ''} for {num_hosts} "
            f"host{'s' if num_hosts != 1 else ''}; name one for each, as in node[1-4] address=10.0.0.[1-4]"
        )
    return addresses


def _check_host(pattern: str) -> None:
    """Raise ConfigError unless the pattern stands for host names or is an address."""
    if ":" in pattern:
        _check_ipv6(pattern)
    elif not _HOST.fullmatch(_BRACKETS.sub("0", pattern)):
        raise ConfigError(
            f"{pattern!r} is not a host; use letters, digits, '.', '_' and '-', and brackets around ranges, as in "
            "node[1-4]"
        )


def _check_ipv6(pattern: str) -> None:
    host, _, number = pattern.partition(":")
    # Other tools write HOST:PORT or HOST:SLOTS; an IPv6 address has more colons.
    if _NUMBER.fullmatch(number):
        raise ConfigError(f"{pattern!r} is not a host; write '{host} port={number}' or '{host} slots={number}'")
    try:
        valid = _ADDRESS.fullmatch(pattern) is not None and ip_address(pattern).version == 6
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{pattern!r} is not an IPv6 address; write it without brackets, as in 2001:db8::7, and a port as port=22"
        )

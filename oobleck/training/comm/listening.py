"""Where a worker listens (an address, a host name or a network interface), and which peers answer there."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from oobleck.control.protocol import WorkerAddress
from oobleck.errors import ConfigError
from oobleck.planner import WorkerId

_BACKLOG = 1024
_SIOCGIFADDR = 0x8915  # netdevice(7)
_PROBE_TIMEOUT_S = 0.5
_MAX_PARALLEL = 32


def listen_at(address: str) -> socket.socket:
    """Listen at a free port of an address, without blocking. Raises ConfigError where no process can listen."""
    host: str | None = address
    if address in _interfaces():
        host = _address_of(address)
    if host is None:
        raise no_place_to_listen(address)
    try:
        listener = socket.create_server((host, 0), backlog=_BACKLOG)
    except OSError as error:
        raise no_place_to_listen(address) from error
    # A caller may hang up between the poll and `accept`, which would then block.
    listener.setblocking(False)
    return listener


def no_place_to_listen(address: str) -> ConfigError:
    """Return the error to raise where a worker cannot listen at its node's address."""
    return ConfigError(
        f"process groups cannot listen at {address}: it is no address, name or network interface of this machine; "
        "name one by address= in the hostfile"
    )


def interface_of(address: str) -> str | None:
    """Return this machine's network interface with a name, host name or IPv4 address, or None."""
    names = _interfaces()
    if address in names:
        return address
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(address, None, socket.AF_INET)}
    except OSError:
        return None
    return next((name for name in names if _address_of(name) in addresses), None)


def probe_all(addresses: Sequence[WorkerAddress]) -> tuple[WorkerId, ...]:
    """Connect to all addresses, and return the workers that do not answer. Takes up to 0.5 s for every 32 of them.

    Process groups hang forever when packets are dropped between two nodes that both reach the master. So when steps
    stop committing, all workers probe each other: one that does not answer has exited or is cut off.
    """
    if not addresses:
        return ()
    with ThreadPoolExecutor(min(len(addresses), _MAX_PARALLEL)) as pool:
        answers = pool.map(_answers, addresses)
        return tuple(each.worker_id for each, has_answered in zip(addresses, answers, strict=True) if not has_answered)


def _answers(address: WorkerAddress) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # An `ifreq` begins with a name of up to 15 bytes and a zero. The address follows two bytes of family and two of
        # port.
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:  # the interface has no IPv4 address
            return None

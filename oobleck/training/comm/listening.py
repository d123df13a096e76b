"""Where a worker listens (an address, a host name or a network interface), and which peers answer there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from oobleck.control.protocol import WorkerAddress
from oobleck.errors import ConfigError
from oobleck.host.interfaces import interface_address, interface_names, resolved_interface
from oobleck.planner import WorkerId

_BACKLOG = 1024
_PROBE_TIMEOUT_S = 0.5
_MAX_PARALLEL = 32


def listen_at(address: str) -> socket.socket:
    """Listen at a free port of an address, without blocking. Raises ConfigError where no process can listen."""
    try:
        listener = socket.create_server((resolved_interface(address), 0), backlog=_BACKLOG)
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
    names = interface_names()
    if address in names:
        return address
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(address, None, socket.AF_INET)}
    except OSError:
        return None
    for name in names:
        with suppress(OSError):  # an interface without an IPv4 address
            if interface_address(name) in addresses:
                return name
    return None


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

"""A worker's doorbell: a port on the data plane's address, where peers can try whether they reach this worker.

Process groups hang for ever when packets are dropped between two nodes that both reach the master. When no step is
committed any more, all workers probe each other: one that does not answer is cut off, or gone.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from oobleck.control.protocol import ProbeAddress
from oobleck.errors import ConfigError
from oobleck.planner import WorkerId

__all__ = ["listen_for_probes", "no_place_to_listen", "probe_all"]

_PROBE_TIMEOUT_S = 0.5
_MAX_PARALLEL = 32
_REST_S = 0.1
_SIOCGIFADDR = 0x8915


def listen_for_probes(worker_id: WorkerId, address: str) -> ProbeAddress:
    """Listen at an address, host name or network interface of this machine, for as long as the process lives.

    Raises ConfigError where no process can listen there.
    """
    try:
        listener = socket.create_server((_host_of(address), 0))
    except OSError as error:
        raise no_place_to_listen(address) from error
    host, port = listener.getsockname()[:2]

    def answer() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:  # the caller is gone, or there are no descriptors left: take a rest
                time.sleep(_REST_S)

    threading.Thread(target=answer, daemon=True, name="reachability probe").start()
    return ProbeAddress(worker_id=worker_id, host=host, port=port)


def no_place_to_listen(address: str) -> ConfigError:
    """Return what to raise where a worker cannot listen at the address that its node was given."""
    return ConfigError(
        f"process groups cannot listen at {address}: it is no address, name or network interface of this machine; "
        "name one by address= in the hostfile"
    )


def probe_all(probe_addresses: Sequence[ProbeAddress]) -> tuple[WorkerId, ...]:
    """Ring at all of them; returns those that do not answer. Takes half a second at most for 32 of them."""
    if not probe_addresses:
        return ()
    with ThreadPoolExecutor(min(len(probe_addresses), _MAX_PARALLEL)) as pool:
        answers = pool.map(_answers, probe_addresses)
        return tuple(bell.worker_id for bell, answers_ in zip(probe_addresses, answers, strict=True) if not answers_)


def _answers(probe_address: ProbeAddress) -> bool:
    try:
        socket.create_connection((probe_address.host, probe_address.port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _host_of(address: str) -> str:
    """The address itself, or that of the network interface which it names."""
    if address not in (name for _, name in socket.if_nameindex()):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", address.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])

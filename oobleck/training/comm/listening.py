"""Where a worker listens: an address, a host name or a network interface of its machine."""

from __future__ import annotations

import fcntl
import socket
import struct

from oobleck.errors import ConfigError

_BACKLOG = 1024
_SIOCGIFADDR = 0x8915


def listen_at(address: str) -> socket.socket:
    """Listen at a free port of an address, without blocking. Raises ConfigError where no process can listen there."""
    try:
        listener = socket.create_server((_host_of(address), 0), backlog=_BACKLOG)
    except OSError as error:
        raise no_place_to_listen(address) from error
    listener.setblocking(False)
    return listener


def no_place_to_listen(address: str) -> ConfigError:
    """Return what to raise where a worker cannot listen at the address that its node was given."""
    return ConfigError(
        f"process groups cannot listen at {address}: it is no address, name or network interface of this machine; "
        "name one by address= in the hostfile"
    )


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address or a host name, or is called so.

    None where no interface has it as an address of IPv4.
    """
    names = [name for _, name in socket.if_nameindex()]
    if address in names:
        return address
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None, socket.AF_INET)}
    except OSError:
        return None
    return next((name for name in names if _address_of(name) in found), None)


def _host_of(address: str) -> str:
    """The address itself, or that of the network interface which it names."""
    if address not in (name for _, name in socket.if_nameindex()):
        return address
    host = _address_of(address)
    if host is None:
        raise no_place_to_listen(address)
    return host


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has none
            return None

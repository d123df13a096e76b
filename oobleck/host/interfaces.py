"""This machine's network interfaces, and their addresses."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # netdevice(7)


def interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def interface_address(interface: str) -> str:
    """Return an interface's IPv4 address. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # An `ifreq` begins with a name of up to 15 bytes and a zero. The address follows two bytes of family and two of
        # port.
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def resolved_interface(name: str) -> str:
    """Return the address of a network interface; any other name is an address already. Raises OSError."""
    return interface_address(name) if name in interface_names() else name

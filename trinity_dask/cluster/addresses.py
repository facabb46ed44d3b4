"""By which address others reach this machine.

Invariant: an address is chosen where it is used, never passed on from another machine.
"""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "127.0.0.1"
AUTO = "auto"


def address_towards(peer: str) -> str:
    """This machine's address on the route to the host ``peer``.

    A host name would be resolved to what on many machines is not the interface that the peer
    can reach.
    """
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket only picks a route; nothing is sent
        return probe.getsockname()[0]


def own_address(interface: str | None) -> str:
    """The address of ``interface``; without one that of the way out, else the loopback.

    Raises:
        ValueError: there is no such interface (names those that are there).
    """
    if interface is not None:
        known = psutil.net_if_addrs()
        for entry in known.get(interface, ()):
            if entry.family == socket.AF_INET:
                return entry.address
        raise ValueError(
            f"cluster.interface={interface!r} has no address here; there are {', '.join(known)}"
        )
    try:
        return address_towards("198.51.100.1")  # reserved for documentation; only the route counts
    except OSError:
        pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def listening_host(host: str, interface: str | None) -> str:
    """The address to listen on, of ``cluster.host`` and ``cluster.interface``. Raises as
    :func:`own_address`."""
    return own_address(interface) if interface is not None or host == AUTO else host


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"

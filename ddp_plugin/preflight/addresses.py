"""Where processes meet: which names and ports are this machine's, and what gloo tells other machines."""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["gloo_address", "is_port_free", "is_this_machine", "machine_identity"]


def is_port_free(port: int) -> bool:
    """Whether a server can listen on a port of this machine now."""
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_ipv6 else [socket.AF_INET]
    for family in families:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port just left is free
            server.bind(("", port))
            server.listen()
            return True
    return False


def gloo_address(variables: Mapping[str, str]) -> str | None:
    """Returns the address at which gloo lets the others look for this process; ``None`` where a device was named.

    By itself gloo takes the first address that the host's name has and that is this machine's, else the loopback's.

    Args:
        variables: such as ``os.environ``.
    """
    if variables.get("GLOO_SOCKET_IFNAME"):
        return None
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as server:
                server.bind(address)
                return str(address[0])
    return "127.0.0.1"


def machine_identity() -> str:
    """Returns what two processes have in common that can meet at a loopback address: the machine, and its network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def is_this_machine(host: str) -> bool | None:
    """Whether a host name is this machine's; ``None`` where the name is not known here.

    An address that a network translates, such as that of a Kubernetes service, is none of this machine.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as server:
            server.bind(address)
            return True
    return False

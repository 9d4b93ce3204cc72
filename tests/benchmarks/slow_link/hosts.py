"""Two hosts on one machine: network namespaces joined by a pair of virtual Ethernet devices, and processes in them.

Everything has a name of its own and goes away with the ``with`` block, after an exception or Ctrl-C as well. The only
processes that are ended are those in these namespaces, and nobody else can have started one there.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CONGESTION_CONTROL",
    "INTERFACE",
    "Host",
    "HostsError",
    "burst_bytes",
    "ended_by_signals",
    "require_namespaces",
    "shape",
    "two_hosts",
]

INTERFACE = "wire"  # the same name on both hosts: each namespace has names of its own
# Linux's own default, whatever this machine is set to. BBR, for one, sizes its window by the shortest round trip, which
# between two namespaces takes microseconds, as on no wire: its few packets then wait for acknowledgements that queue
# behind the other host's data, and a link that is busy both ways idles for a tenth of the time.
CONGESTION_CONTROL = "cubic"
QUEUE_MS = 50  # a packet that would wait longer is dropped, as a switch would; TCP then slows down
MIN_BURST_BYTES = 16_000
BURST_MS = 1.0
GRACE_S = 3.0


class HostsError(RuntimeError):
    """This machine cannot be divided into two hosts; the message says why, in one sentence."""


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        namespace: its name for ``ip netns``.
        address: its IPv4 address on the link.
    """

    namespace: str
    address: str

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path
    ) -> "subprocess.Popen[bytes]":
        """Starts a process on this host, with its output in a file."""
        with open(log, "ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the one who started it, who ends these
            )

    def pids(self) -> list[int]:
        """Returns the processes that live on this host."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def end_processes(self) -> None:
        """Ends all processes on this host."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
            deadline = time.monotonic() + GRACE_S
            while self.pids() and time.monotonic() < deadline:
                time.sleep(0.05)


def require_namespaces(euid: Callable[[], int] = os.geteuid, which: Callable[[str], str | None] = shutil.which) -> None:
    """Raises where two hosts cannot be made here.

    Args:
        euid: returns the effective user id.
        which: finds a program.

    Raises:
        HostsError: no root rights, or no ``ip`` or ``tc``.
    """
    missing = [program for program in ("ip", "tc") if which(program) is None]
    if missing:
        raise HostsError(f"The slow-link benchmark needs {' and '.join(missing)} (package iproute2), and found none.")
    if euid() != 0:
        raise HostsError("The slow-link benchmark needs root rights, because it makes network namespaces.")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise HostsError(f"Two hosts cannot be made on this machine: `{' '.join(command)}` says: {words}")


def burst_bytes(rate_mbit: float) -> int:
    """Returns how much may pass at once after a pause: a millisecond's worth, and room for a few packets at least.

    A larger one would let small messages through as if there were no limit.
    """
    return max(MIN_BURST_BYTES, round(rate_mbit * 1e6 / 8 * BURST_MS / 1e3))


def shape(rate_mbit: float | None) -> None:
    """Limits what this process's host may send; to be called on each host for itself.

    Args:
        rate_mbit: the limit in 10^6 bits per second, Ethernet headers included; ``None`` lifts it.

    Raises:
        HostsError: ``tc`` refused.
    """
    if rate_mbit is None:
        subprocess.run(["tc", "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True, check=False)
        return
    limits = ["rate", f"{rate_mbit}mbit", "burst", str(burst_bytes(rate_mbit)), "latency", f"{QUEUE_MS}ms"]
    _call("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limits)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block has ended, so that it cleans up to the end."""
    waiting = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM into an exception, like Ctrl-C, so that what is open is closed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(host: Host) -> None:
    with _undisturbed():
        host.end_processes()
        subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts with an open link between them; :func:`shape` limits it.

    Raises:
        HostsError: they cannot be made here.
    """
    require_namespaces()
    name = f"slowlink-{os.getpid()}-{secrets.token_hex(2)}"
    hosts = Host(f"{name}-0", "10.213.0.1"), Host(f"{name}-1", "10.213.0.2")
    first, second = (host.namespace for host in hosts)
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(_remove, host)  # before it exists: there is no moment at which it would stay behind
            _call("ip", "netns", "add", host.namespace)
        _call(
            "ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second
        )
        for host in hosts:
            _call("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _call("ip", "-n", host.namespace, "link", "set", device, "up")
            route = ["10.213.0.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link", "src", host.address]
            _call("ip", "-n", host.namespace, "route", "replace", *route, "congctl", CONGESTION_CONTROL)
        yield hosts

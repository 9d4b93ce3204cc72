"""One torchrun agent on each of two hosts that meet by c10d, and what can happen to the hosts."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.benchmarks.slow_link.hosts import INTERFACE, Host, two_hosts
from tests.chaos.killing import environment
from tests.harness import ROOT

__all__ = ["OWN_STORE", "PORT", "TwoAgents", "two_agents"]

PORT = 29_517  # of the hosts' own network: nobody else can have it
_LOOK_S = 0.02
# By default the agent of rank 0 keeps one store over all restarts, and never tells a host that joins later where it is.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class TwoAgents:
    """``torchrun --nnodes=2`` on two hosts; the first one holds the rendezvous.

    Args:
        hosts: the two.
        folder: shared by both, as a network file system would be: notes, outputs, checkpoints.
        arguments: settings of the recipe.
        step_s: seconds that are added to each step.
        rendezvous: options of ``--rdzv-conf``.
        variables: of the environment, beside this process's.
    """

    def __init__(
        self,
        hosts: tuple[Host, Host],
        folder: Path,
        arguments: Sequence[str],
        step_s: float,
        rendezvous: str,
        variables: Mapping[str, str],
    ) -> None:
        self.hosts = hosts
        self.folder = folder
        self._arguments = [*arguments, f"output_dir={folder}"]
        self._step_s = step_s
        self._rendezvous = rendezvous
        self._variables = dict(variables)
        self.agents: list[subprocess.Popen[bytes] | None] = [None, None]

    def start(self, number: int) -> None:
        """Starts the agent of a host, or that of another host in its place."""
        host = self.hosts[number]
        self._reap(number)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=two"]
        command += [
            f"--rdzv-endpoint={self.hosts[0].address}:{PORT}",
            f"--rdzv-conf={self._rendezvous},is_host={int(number == 0)}",
        ]
        command += [f"--local-addr={host.address}"]
        command += [str(ROOT / "tests" / "chaos" / "program.py"), str(self.folder), str(self._step_s), "0"]
        variables = environment() | {"GLOO_SOCKET_IFNAME": INTERFACE} | self._variables
        self.agents[number] = host.start([*command, *self._arguments], variables, self.folder, self.output_file(number))

    def _reap(self, number: int) -> None:
        agent = self.agents[number]
        if agent is not None:
            agent.wait()

    def reap(self) -> None:
        """Waits for agents that have been ended."""
        for number in (0, 1):
            self._reap(number)

    def output_file(self, number: int) -> Path:
        """Returns the file with what a host's processes printed."""
        return self.folder / f"output-{number}"

    def output(self, number: int) -> str:
        """Returns what a host's processes printed so far."""
        path = self.output_file(number)
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self, number: int) -> int | None:
        """Returns the exit status of a host's agent, ``None`` while it lives."""
        agent = self.agents[number]
        return None if agent is None else agent.poll()

    def set_link(self, state: str) -> None:
        """Cuts the second host's end of the wire, or joins it again: ``"down"`` or ``"up"``."""
        command = ["ip", "-n", self.hosts[1].namespace, "link", "set", INTERFACE, state]
        subprocess.run(command, check=True, capture_output=True)

    def kill_host(self, number: int) -> None:
        """Ends all of a host's processes at once; its kernel resets their connections, if the link is up."""
        pids = [str(pid) for pid in self.hosts[number].pids()]
        subprocess.run(["kill", "-KILL", *pids], check=False, capture_output=True)

    def wait_until(self, condition: Callable[[], bool], patience_s: float) -> float:
        """Waits until it comes true; returns how long that took in seconds.

        Raises:
            TimeoutError: with both hosts' output.
        """
        begun_s = time.monotonic()
        while not condition():
            if time.monotonic() - begun_s > patience_s:
                outputs = "\n".join(f"--- host {number}:\n{self.output(number)[-5000:]}" for number in (0, 1))
                raise TimeoutError(f"not within {patience_s:.0f} s\n{outputs}")
            time.sleep(_LOOK_S)
        return time.monotonic() - begun_s


@contextlib.contextmanager
def two_agents(
    folder: Path,
    arguments: Sequence[str],
    *,
    rendezvous: str,
    step_s: float = 0.1,
    variables: Mapping[str, str] = OWN_STORE,
    tcp_retries: int | None = None,
) -> Iterator[TwoAgents]:
    """Makes two hosts and an agent on each; all of it is gone afterwards.

    Args:
        folder: see :class:`TwoAgents`, as the next ones.
        arguments: of the recipe.
        rendezvous: options.
        step_s: seconds.
        variables: of the environment.
        tcp_retries: ``net.ipv4.tcp_retries2`` of both hosts: how often a packet is sent again before its connection is
            given up; ``None`` leaves Linux's 15, a quarter of an hour.

    Raises:
        HostsError: two hosts cannot be made on this machine.
    """
    with contextlib.ExitStack() as after, two_hosts() as hosts:
        run = TwoAgents(hosts, folder, arguments, step_s, rendezvous, variables)
        after.callback(run.reap)  # behind the end of the hosts, which ends their processes
        for number, host in enumerate(hosts):
            if tcp_retries is not None:
                limit = f"echo {tcp_retries} > /proc/sys/net/ipv4/tcp_retries2"
                command = ["ip", "netns", "exec", host.namespace, "sh", "-c", limit]
                subprocess.run(command, check=True, capture_output=True)
            run.start(number)
        yield run

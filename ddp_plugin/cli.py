"""The command line: ``ddp-plugin doctor | plan | tune | trace | ring``."""

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence

from ddp_plugin import __version__
from ddp_plugin.commands import doctor, plan, ring, trace, tune
from ddp_plugin.errors import is_explained

__all__ = ["main"]

_COMMANDS = {"doctor": doctor, "plan": plan, "tune": tune, "trace": trace, "ring": ring}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: those of the process when ``None``.

    Returns:
        The exit status: 0, or 2 for what a person can correct, which is printed in words; 130 after Ctrl+C; that of a
        traced command is the command's own.
    """
    parser = argparse.ArgumentParser(
        prog="ddp-plugin", description="See and steer data-parallel training, before it runs and while it does."
    )
    parser.add_argument("--version", action="version", version=f"ddp_plugin {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        own = commands.add_parser(name, help=command.HELP, description=f"{command.HELP[0].upper()}{command.HELP[1:]}.")
        command.add_arguments(own)
    chosen = parser.parse_args(arguments)
    try:
        status: int = _COMMANDS[chosen.command].run(chosen)
    except (ValueError, ModuleNotFoundError, OSError) as mistake:
        if isinstance(mistake, ValueError) and not is_explained(mistake):  # out of somebody's model, data or script
            traceback.print_exc()
        print(f"ddp-plugin {chosen.command}: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nddp-plugin {chosen.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status

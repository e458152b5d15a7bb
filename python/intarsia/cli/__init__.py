"""The command `intarsia`: train, memory, doctor."""

import argparse
import sys

from . import doctor, memory, train


class _PrintVersion(argparse.Action):
    def __call__(self, parser, *_):
        from .. import __version__  # not before it is asked for: `doctor` works without the core

        print(f"intarsia {__version__}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status. Mistakes of the user end in one sentence and status 2."""
    parser = argparse.ArgumentParser(
        prog="intarsia", description="Mixture-of-Experts layers for training: demo and tools."
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (train, memory, doctor):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, NotImplementedError, ImportError) as error:
        print(f"intarsia: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("intarsia: interrupted", file=sys.stderr)
        return 130

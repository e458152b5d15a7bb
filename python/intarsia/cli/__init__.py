"""The command `intarsia`: train, memory, doctor."""

import argparse
import sys

from . import doctor, memory, train


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status. Mistakes of the user end in one sentence and status 2."""
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="intarsia", description="Mixture-of-Experts layers for training: demo and tools."
    )
    parser.add_argument("--version", action="version", version=f"intarsia {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (train, memory, doctor):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, NotImplementedError) as error:
        print(f"intarsia: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("intarsia: interrupted", file=sys.stderr)
        return 130

"""Entry point of the command `magnetar`: everything else is imported when it is needed.

The thin install brings this module but not typer and rich; then it says in one line what to install. Daemons take the short
way past typer (`flags`), everything else goes to magnetar.cli.app. `magnetar bookie` is a daemon, and a family of commands
for its operator when a subcommand follows.
"""

import importlib
import os
import signal
import sys

REQUIRED = ("typer", "rich")
DAEMONS = ("standalone", "bookie", "broker", "autorecovery")
_HELP = ("-h", "--help")


def _is_daemon(line: list[str]) -> bool:
    if not line or line[0] not in DAEMONS or any(option in line for option in _HELP):
        return False
    return not (line[0] == "bookie" and line[1:2] and not line[1].startswith("-"))


def _check_streams() -> None:
    """Exit 1 when a standard stream is closed: the next file or socket would take its number, and be written to as it."""
    for number, name in enumerate(("input", "output", "error")):
        try:
            os.fstat(number)
        except OSError:
            sys.exit(f"magnetar: standard {name} is closed; redirect it to /dev/null")


def main() -> None:
    """Run the command line; exit 1 with one line when the `server` extra is not installed."""
    _check_streams()
    line = sys.argv[1:]
    try:
        if _is_daemon(line):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop handles it: no traceback
            daemons = importlib.import_module("magnetar.cli.wiring.daemons")
            sys.exit(daemons.main(line[0], line[1:]))
        for name in REQUIRED:
            importlib.import_module(name)
        app = importlib.import_module("magnetar.cli.app")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("magnetar"):
            raise
        sys.exit(
            "magnetar: the command line needs packages that the thin client does not: "
            f"pip install '.[server]' in Magnetar's folder  (missing: {error.name})"
        )
    app.app(prog_name="magnetar")


if __name__ == "__main__":
    main()

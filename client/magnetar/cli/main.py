"""Entry point of the command `magnetar`: everything else is imported when it is needed.

The thin install brings this module but not typer and rich; then it says in one line what to install. Daemons take the short
way past typer (`wiring.flags`), everything else goes to magnetar.cli.app.
"""

import os
import signal
import sys


def _check_streams() -> None:
    """Exit 1 when a standard stream is closed: the next file or socket would take its number, and be written to as it."""
    for number, name in enumerate(("input", "output", "error")):
        try:
            os.fstat(number)
        except OSError:
            sys.exit(f"magnetar: standard {name} is closed; redirect it to /dev/null")


def main() -> None:
    """Run the command line; exit 1 with one line when the `server` extra is not installed."""
    from .wiring.flags import is_daemon

    _check_streams()
    line = sys.argv[1:]
    try:
        if is_daemon(line):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop handles it: no traceback
            from .wiring.daemons import main as run_daemon

            sys.exit(run_daemon(line[0], line[1:]))
        from .app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("magnetar"):
            raise
        sys.exit(
            "magnetar: the command line needs packages that the thin client does not: "
            f"pip install '.[server]' in Magnetar's folder  (missing: {error.name})"
        )
    app(prog_name="magnetar")


if __name__ == "__main__":
    main()

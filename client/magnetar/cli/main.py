"""Entry point of the command `magnetar`: everything behind it is imported late.

The thin install brings this module but not typer and rich; then it says in one line what to install. Daemons take the short
way past typer (`flags`), everything else goes to magnetar.cli.app.
"""

import importlib
import sys

REQUIRED = ("typer", "rich")
DAEMONS = ("standalone", "bookie", "broker")
_HELP = ("-h", "--help")


def main() -> None:
    """Run the command line; exit 1 with one line when the `server` extra is not installed."""
    line = sys.argv[1:]
    try:
        if line and line[0] in DAEMONS and not any(option in line for option in _HELP):
            daemons = importlib.import_module("magnetar.cli.daemons")
            sys.exit(daemons.main(line[0], line[1:]))
        for name in REQUIRED:
            importlib.import_module(name)
        app = importlib.import_module("magnetar.cli.app")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("magnetar"):
            raise
        sys.exit(
            "magnetar: the command line needs packages that the thin client does not: "
            f"pip install 'magnetar[server]'  (missing: {error.name})"
        )
    app.app(prog_name="magnetar")


if __name__ == "__main__":
    main()

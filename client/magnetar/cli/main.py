"""Entry point of the command `magnetar`: everything behind it is imported late.

The thin install brings this module but not typer and rich; then it says in one line what to install. The
commands themselves are in magnetar.cli.app.
"""

import importlib
import sys

REQUIRED = ("typer", "rich")


def main() -> None:
    """Run the command line; exit 1 with one line when the `server` extra is not installed."""
    for name in REQUIRED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.exit(
                "magnetar: the command line needs packages that the thin client does not: "
                f"pip install 'magnetar[server]'  (missing: {name})"
            )
    app = importlib.import_module("magnetar.cli.app")
    app.app()


if __name__ == "__main__":
    main()

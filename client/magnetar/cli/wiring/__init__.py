"""Daemons put together: settings, stores, bookies, brokers, repairs; HTTP, signals and exit codes of the process."""

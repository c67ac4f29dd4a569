"""`magnetar bookie SUBCOMMAND`: what an operator asks of a bookie that runs, or of the files of a stopped one."""

"""Inspects and changes the directories of a stopped bookie, for `magnetar bookie SUBCOMMAND`.

Results are typed, and nothing is printed. `StoppedBookie.open` takes the bookie's lock; everything else takes a
StoppedBookie. Inspection changes nothing: no byte and no name below the bookie's directories, the lock file apart.
"""

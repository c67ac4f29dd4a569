"""The one command, magnetar; the only room that may see every other."""

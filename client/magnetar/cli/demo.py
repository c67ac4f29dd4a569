"""`python -m magnetar.cli.demo` (`make demo`): real flight data through a real service that is killed half way.

This part is being built right now by the bench and demo room; it is taken.
"""

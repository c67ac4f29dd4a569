"""What ends a comparison."""


class CompareFailed(Exception):
    """The text says what is missing and what to do about it."""

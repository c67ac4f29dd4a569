"""Visits every state that a world can reach, breadth first, so that the first violation found is a shortest one.

A world is mutable while one action is applied to a copy of it, and identified by its `key`. States with equal keys are the
same state; a world that maps symmetric states to one key makes the search smaller without missing anything, as long as
renaming a state's parts renames what follows from it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

Action = Callable[[], None]


class World(Protocol):
    """One state of a system."""

    def copy(self) -> Self:
        """Independent of this one."""
        ...

    def key(self) -> Hashable:
        """What tells states apart."""
        ...

    def actions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """What can happen next: a text for people, and what `apply` takes."""
        ...

    def apply(self, action: tuple[object, ...]) -> None:
        """Makes it happen to this world."""
        ...

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        ...


@dataclass(frozen=True, slots=True)
class Explored:
    """Result of a search without a violation."""

    states: int
    transitions: int
    depth: int
    seconds: float
    exhausted: bool  # False: a limit ended it


class Violation(AssertionError):
    """An invariant that does not hold, with the shortest way to it."""

    def __init__(self, reason: str, path: list[str], turns: list[int] | None = None, states: int = 0) -> None:
        self.reason = reason
        self.path = path
        self.turns = turns or []  # which of a state's steps was taken each time, to walk the way again
        self.states = states  # seen until then
        steps = "\n".join(f"  {number:2}. {step}" for number, step in enumerate(path, 1))
        super().__init__(f"{reason}\nafter\n{steps}")


def explore(start: World, *, max_states: int = 1 << 62, max_seconds: float = 1e9) -> Explored:
    """Raises Violation."""
    began = time.perf_counter()
    # Only hashes of keys are kept: among 10^7 states two different ones share a 64-bit hash with a chance of 3 in 10^6.
    seen = {hash(start.key())}
    parents: list[tuple[int, str]] = [(-1, "start")]
    frontier: deque[tuple[World, int, int]] = deque([(start, 0, 0)])
    transitions = depth = 0
    start.check()
    while frontier:
        if len(parents) >= max_states or time.perf_counter() - began > max_seconds:
            return Explored(len(parents), transitions, depth, time.perf_counter() - began, False)
        world, number, depth = frontier.popleft()
        for text, action in world.actions():
            transitions += 1
            following = world.copy()
            try:
                following.apply(action)
                following.check()
            except AssertionError as error:
                raise Violation(str(error) or repr(error), [*_path(parents, number), text]) from error
            mark = hash(following.key())
            if mark not in seen:
                seen.add(mark)
                parents.append((number, text))
                frontier.append((following, len(parents) - 1, depth + 1))
    return Explored(len(parents), transitions, depth, time.perf_counter() - began, True)


def _path(parents: list[tuple[int, str]], number: int) -> list[str]:
    steps: list[str] = []
    while number > 0:
        number, text = parents[number]
        steps.append(text)
    return steps[::-1]

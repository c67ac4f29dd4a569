"""Breadth-first search over a `Model` whose states are values: what `explorer` does, ten times as fast.

Only hashes of keys and two numbers a state are kept; the way to a violation is found by walking it again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

from .explorer import Explored, Violation


class Model(Protocol):
    """States are hashable values; `Any` here."""

    def start(self) -> Any:
        """The first state."""
        ...

    def following(self, state: Any) -> list[tuple[Any, ...]]:
        """What can happen next, always in the same order: the state after it, and what `text` takes."""
        ...

    def key(self, state: Any) -> Hashable:
        """What tells states apart."""
        ...

    def check(self, state: Any) -> None:
        """Raises AssertionError when an invariant does not hold."""
        ...

    def text(self, action: tuple[Any, ...]) -> str:
        """For people."""
        ...


class Broken(AssertionError):
    """An action that breaks something while it happens."""

    def __init__(self, reason: str, action: tuple[Any, ...]) -> None:
        super().__init__(reason)
        self.action = action


def search(model: Model, *, max_states: int = 1 << 62, max_seconds: float = 1e9) -> Explored:
    """Raises Violation, with a shortest way. `max_seconds` are of CPU, so are those of the result."""
    began = time.process_time()
    start = model.start()
    model.check(start)
    # 64-bit hashes: among 10^7 states two different ones share one with a chance of 3 in 10^6.
    seen = {hash(model.key(start))}
    parents, choices = array("q", [-1]), array("H", [0])
    level: list[Any] = [start]
    first = 0  # number of the level's first state
    transitions = depth = 0
    while level:
        # Most transitions lead to what another one of this level led to, under the same names: found without a key.
        met: set[Any] = set()
        following_level: list[Any] = []
        for number, state in enumerate(level, first):
            if len(parents) >= max_states or time.process_time() - began > max_seconds:
                return Explored(len(parents), transitions, depth, time.process_time() - began, False)
            try:
                steps = model.following(state)
            except AssertionError as error:
                steps_to, turns = _way(model, parents, choices, number)
                if isinstance(error, Broken):
                    steps_to.append(model.text(error.action))
                raise Violation(str(error), steps_to, turns, len(parents)) from error
            for choice, (following, *_) in enumerate(steps):
                transitions += 1
                if following in met:
                    continue
                met.add(following)
                mark = hash(model.key(following))
                if mark in seen:
                    continue
                seen.add(mark)
                parents.append(number)
                choices.append(choice)
                try:
                    model.check(following)
                except AssertionError as error:
                    steps_to, turns = _way(model, parents, choices, len(parents) - 1)
                    raise Violation(str(error), steps_to, turns, len(parents)) from error
                following_level.append(following)
        first += len(level)
        level = following_level
        depth += 1
    return Explored(len(parents), transitions, depth, time.process_time() - began, True)


def _way(model: Model, parents: array[int], choices: array[int], number: int) -> tuple[list[str], list[int]]:
    """The steps to a state, as texts and as what `walk` takes."""
    taken: list[int] = []
    while number > 0:
        taken.append(choices[number])
        number = parents[number]
    state, texts, turns = model.start(), [], []
    for choice in reversed(taken):
        steps = model.following(state)
        order = _by_text(model, steps)
        turns.append(order.index(choice))
        state, *action = steps[choice]
        texts.append(model.text(tuple(action)))
    return texts, turns


def walk(model: Model, turns: list[int]) -> Iterator[tuple[str, Any]]:
    """The way again: each step and the state after it. Raises Broken where the last step breaks something."""
    state = model.start()
    for turn in turns:
        steps = model.following(state)
        state, *action = steps[_by_text(model, steps)[turn]]
        yield model.text(tuple(action)), state


def _by_text(model: Model, steps: list[tuple[Any, ...]]) -> list[int]:
    """An order of steps that does not depend on what the model met before."""
    texts = [model.text(tuple(action)) for _, *action in steps]
    return sorted(range(len(steps)), key=texts.__getitem__)

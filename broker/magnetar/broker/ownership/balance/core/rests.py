"""Bundles that were moved or split a moment ago, and rest: neither they nor parts of them are moved or split again."""

from __future__ import annotations

from .facts import bundle_range, namespace_of


class Rests:
    """By namespace, since a part of a resting bundle is found by its range."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}  # namespace -> bundle -> end of its rest

    def __len__(self) -> int:
        return sum(map(len, self._until.values()))

    def rest(self, bundle: str, until: float) -> None:
        """From now on until that time, or as long as it rests anyway."""
        resting = self._until.setdefault(namespace_of(bundle), {})
        resting[bundle] = max(until, resting.get(bundle, until))

    def resting(self, bundle: str, now: float) -> bool:
        """Whether it, or a bundle that it was part of, rests."""
        resting = self._until.get(namespace_of(bundle))
        if not resting:
            return False
        if (until := resting.get(bundle)) is not None:
            return now < until
        first, last = bundle_range(bundle)
        return any(
            now < until and begin <= first and last <= end
            for one, until in resting.items()
            for begin, end in (bundle_range(one),)
        )

    def forget_ended(self, now: float) -> None:
        """Those whose rest has ended."""
        for namespace, resting in list(self._until.items()):
            left = {bundle: until for bundle, until in resting.items() if now < until}
            if left:
                self._until[namespace] = left
            else:
                del self._until[namespace]

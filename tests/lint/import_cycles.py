"""Modules that import each other in a circle, found in the import graph of all rooms.

An import under `if TYPE_CHECKING` counts: whoever reads one of the modules still has to know all of them.
"""

from collections.abc import Iterable, Mapping

import grimp

ROOMS = ("proto", "runtime", "metadata", "ledger", "bookie", "broker", "client", "archive", "spark", "cli")

Graph = Mapping[str, Iterable[str]]  # module -> the modules that it imports


def import_graph() -> dict[str, list[str]]:
    """The imports between the modules of `magnetar`, both sides sorted."""
    graph = grimp.build_graph(*(f"magnetar.{room}" for room in ROOMS), cache_dir=None)
    return {
        module: sorted(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)
    }


def find_cycles(graph: Graph) -> list[list[str]]:
    """The groups of two and more modules of which each reaches every other, sorted (Tarjan's algorithm)."""
    number: dict[str, int] = {}  # in the order in which modules are first reached
    lowest: dict[str, int] = {}  # the lowest number that a module reaches among those on the stack
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for imported in graph.get(module, ()):
            if imported not in number:
                visit(imported)
            if imported in stack:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == number[module]:
            start = stack.index(module)
            group = sorted(stack[start:])
            del stack[start:]
            if len(group) > 1:
                cycles.append(group)

    for module in graph:
        if module not in number:
            visit(module)
    return sorted(cycles)

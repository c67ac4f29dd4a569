"""Modules that import each other in a circle, found in the import graph of all rooms.

An import under `if TYPE_CHECKING` counts: whoever reads one of the modules still has to know all of them. So does one by
name: a string that is given to `import_module` or `import_in_thread`, or to a parameter `imports`.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping

import grimp

from lint.sources import production_sources

ROOMS = ("proto", "runtime", "metadata", "ledger", "bookie", "broker", "client", "archive", "spark", "cli")

Graph = Mapping[str, Iterable[str]]  # module -> the modules that it imports


def import_graph() -> dict[str, list[str]]:
    """The imports between the modules of `magnetar`, both sides sorted."""
    graph = grimp.build_graph(*(f"magnetar.{room}" for room in ROOMS), cache_dir=None)
    found = {module: set(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}
    for source in production_sources():
        package, _, name = source.path.partition("/")[2].removesuffix(".py").replace("/", ".").rpartition(".")
        module = package if name == "__init__" else f"{package}.{name}"
        if module in found:
            found[module] |= set(imported_by_name(source.tree, package)) & graph.modules
    return {module: sorted(imported) for module, imported in found.items()}


def imported_by_name(tree: ast.Module, package: str) -> Iterator[str]:
    """What a module of `package` imports by a name in a string."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given: list[ast.expr] = [keyword.value for keyword in node.keywords if keyword.arg == "imports"]
        if function in ("import_module", "import_in_thread"):
            given += node.args
        for constant in [
            inner for value in given for inner in ast.walk(value) if isinstance(inner, ast.Constant)
        ]:
            if isinstance(constant.value, str):
                yield importlib.util.resolve_name(constant.value, package)


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

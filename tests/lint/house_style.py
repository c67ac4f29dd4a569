"""House style that can be counted: size of modules and functions, module docstrings, empty names and docstrings.

A function's length is its lines from `def` to the last one, its docstring not counted: explaining is free.
What must be longer goes into ALLOWED with a reason that a reader will accept.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from lint.sources import Allow, Finding, Source

MAX_MODULE_LINES = 600  # past it, look whether it is two things
MAX_FUNCTION_LINES = 60

# Words that say nothing about what a thing does.
EMPTY_CLASS_NAME = re.compile(r"(Manager|Helper|Helpers|Impl|Util|Utils)$")
EMPTY_MODULE_NAMES = frozenset({"util", "utils", "helper", "helpers", "misc", "common"})

WARNINGS = frozenset({"module-length", "function-length"})
RULES = frozenset({"module-length", "function-length", "module-docstring", "empty-name", "empty-docstring"})

# Of an implementation of a protocol: its method is described there, and whoever reads this one knows the protocol.
EMPTY_DOCSTRING = re.compile(r"See `?[A-Z][A-Za-z.]*`?\.")

# One line per exception, each with its reason.
ALLOWED: tuple[Allow, ...] = (
    Allow(
        "bookie/magnetar/metadata/ledgers.py", frozenset({"empty-name"}), "LedgerManager is BookKeeper's term"
    ),
    Allow(
        "client/magnetar/client/*",
        frozenset({"empty-docstring"}),
        "users meet these classes: help() says where a method is described",
    ),
)


def check(source: Source) -> Iterator[Finding]:
    """Yield what breaks the house style in one file, without regard to ALLOWED."""
    path, tree = source.path, source.tree
    lines = source.text.count("\n") + (not source.text.endswith("\n") and bool(source.text))
    if lines > MAX_MODULE_LINES:
        yield Finding(path, 1, "module-length", f"{lines} lines; at most {MAX_MODULE_LINES}")
    if tree.body and ast.get_docstring(tree, clean=False) is None:
        yield Finding(path, 1, "module-docstring", "a module says in its docstring what it is for")
    if PurePosixPath(path).stem in EMPTY_MODULE_NAMES:
        yield Finding(path, 1, "empty-name", "a module is named after what it does")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and EMPTY_CLASS_NAME.search(node.name):
            yield Finding(path, node.lineno, "empty-name", f"{node.name}: name it in the field's words")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if len(node.body) > 1 and EMPTY_DOCSTRING.fullmatch(ast.get_docstring(node) or ""):
                yield Finding(
                    path, node.lineno, "empty-docstring", f"{node.name}: it says nothing of its own"
                )
            length = function_lines(node)
            if length > MAX_FUNCTION_LINES:
                message = f"{node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"
                yield Finding(path, node.lineno, "function-length", message)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring's own lines."""
    last = node.end_lineno or node.lineno
    first = node.body[0]
    docstring = 0
    if ast.get_docstring(node, clean=False) is not None:
        docstring = (first.end_lineno or first.lineno) - first.lineno + 1
    return last - node.lineno + 1 - docstring

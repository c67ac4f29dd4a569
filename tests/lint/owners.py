"""The lint of tasks: each has an owner that notices its end (rule 46).

A task that is made with `create_task` or `ensure_future` ends without a word when nobody looks at it: its exception shows
when the garbage collector finds it, which for a task that its owner keeps is never. The ways of magnetar.runtime.tasks log,
restart or hand over what a task raises; a TaskGroup raises it. What makes a task by hand stands in ALLOWED, with the reason.
"""

import ast
from collections.abc import Iterator

from lint.kinds import Kinds
from lint.sources import Allow, Finding, Source

MAKERS = frozenset({"create_task", "ensure_future"})
KEPT = frozenset({"magnetar.runtime.tasks.awaited", "magnetar.runtime.tasks.LongTask"})
RULES = frozenset({"task-owner"})

ALLOWED: tuple[Allow, ...] = (
    Allow("proto/magnetar/runtime/tasks.py", RULES, "the owners themselves"),
    Allow("client/magnetar/cli/commands/perf.py", RULES, "makes futures of receipts, and looks at each"),
)


def check(source: Source) -> Iterator[Finding]:
    """Yield the tasks of one file that are made without an owner, without regard to ALLOWED."""
    kinds = Kinds(source.tree)
    groups = set(_groups(source.tree, kinds))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (name := _maker(node.func)) is not None:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if not (isinstance(owner, ast.Name) and owner.id in groups):
                yield Finding(
                    source.path, node.lineno, "task-owner",
                    f"{name}: use LongTask, begin, awaited or a TaskSet of magnetar.runtime.tasks",
                )  # fmt: skip
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            name = kinds.qualified(call.func) if isinstance(call.func, ast.Attribute | ast.Name) else None
            if name in KEPT:
                message = f"what {name.rpartition('.')[2]} returns is awaited, or closed, by whoever keeps it"
                yield Finding(source.path, node.lineno, "task-owner", message)


def _maker(function: ast.expr) -> str | None:
    name = (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else None
    )
    return name if name in MAKERS else None


def _groups(tree: ast.Module, kinds: Kinds) -> Iterator[str]:
    """Names of task groups, which raise what their tasks raise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                call, name = item.context_expr, item.optional_vars
                if (
                    isinstance(call, ast.Call)
                    and isinstance(name, ast.Name)
                    and isinstance(call.func, ast.Attribute | ast.Name)
                    and kinds.qualified(call.func) == "asyncio.TaskGroup"
                ):
                    yield name.id

"""What a file says about its own names: where an import comes from, and what is a set or a Path.

This is reading, not type inference. A name's kind comes from its annotation, or from what it is assigned
(`set()`, `{a, b}`, `Path(...)`), within the function that uses it or the module around it; an attribute's
from the classes of the same file. A name that is written down as two kinds has none: the lint prefers to
miss something over crying wolf.

Example: with `self.waiting: set[int] = set()` in a class, `for x in self.waiting` is known to iterate a set,
and so is `for x in self.waiting - done`.
"""

import ast
import builtins
from collections.abc import Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = FunctionNode | ast.Module

SET_TYPES = frozenset({"set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet", "WeakSet"})
SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference", "copy"})
SET_OPERATORS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
PATH_TYPES = frozenset({"Path", "PosixPath"})
KINDS_OF_CALLS = {"pathlib.Path": "path", "pathlib.Path.cwd": "path", "asyncio.all_tasks": "set"}
PATH_CALLS = frozenset({"joinpath", "with_suffix", "with_name", "absolute", "expanduser", "resolve"})


def enclosing(node: ast.AST, kinds: "Kinds") -> Iterator[ast.AST]:
    """The nodes around this one, innermost first."""
    around = kinds.parent(node)
    while around is not None:
        yield around
        around = kinds.parent(around)


class Kinds:
    """The names of one module: imports, parents, sets and paths."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents: dict[ast.AST, ast.AST] = {}
        self._imports: dict[str, str] = {}  # local name -> dotted name it stands for
        self._names: dict[tuple[Scope, str], set[str]] = {}  # kinds a name is written down as, per scope
        self._attributes: dict[str, set[str]] = {}  # the same for attributes, over all classes of the file
        self._declared: set[tuple[Scope, str]] = set()  # names with an annotation; it outweighs assignments
        self._assigned: set[str] = set()  # names bound anywhere, so no longer the builtin
        for parent in ast.walk(tree):
            for child in ast.iter_child_nodes(parent):
                self._parents[child] = parent
        # Three passes, because what is read in one rests on what the passes before it noted.
        for note in (self._note_import, self._note_declaration, self._note_binding):
            for node in ast.walk(tree):
                note(node)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node that contains this one."""
        return self._parents.get(node)

    def is_builtin(self, name: str) -> bool:
        """Whether the name still means what it means in an empty module."""
        return hasattr(builtins, name) and name not in self._imports and name not in self._assigned

    def qualified(self, node: ast.expr) -> str | None:
        """The dotted name of an imported thing: `t.monotonic` after `import time as t` is time.monotonic."""
        match node:
            case ast.Name(id=name):
                return self._imports.get(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.qualified(value)
                return None if owner is None else f"{owner}.{attr}"
            case _:
                return None

    def is_set(self, node: ast.expr) -> bool:
        """Whether the expression is known to be a set."""
        return self._kind(node) == "set"

    def is_path(self, node: ast.expr) -> bool:
        """Whether the expression is known to be a pathlib.Path."""
        return self._kind(node) == "path"

    def _kind(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self._kind_of_name(node, name)
            case ast.Attribute(attr=attr):
                return _only(self._attributes.get(attr))
            case ast.IfExp(body=body, orelse=other):
                return self._kind(body) if self._kind(body) == self._kind(other) else ""
            case ast.Set() | ast.SetComp():
                return "set"
            case ast.BinOp(left=left, op=ast.Div()):
                return "path" if self._kind(left) == "path" else ""
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, SET_OPERATORS):
                either = (left, right)
                return "set" if any(self._kind(e) == "set" or _is_keys_view(e) for e in either) else ""
            case ast.Call(func=ast.Name(id=name)):
                return _kind_of_type_name(name)
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)):
                kind = self._kind(owner)
                if (kind == "set" and attr in SET_METHODS) or (kind == "path" and attr in PATH_CALLS):
                    return kind
                return KINDS_OF_CALLS.get(self.qualified(node.func) or "", "")
            case _:
                return ""

    def _kind_of_name(self, node: ast.AST, name: str) -> str:
        for scope in enclosing(node, self):
            if isinstance(scope, Scope) and (scope, name) in self._names:
                return _only(self._names[scope, name])
        return ""

    def _note_import(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.partition(".")[0]
                    self._imports[alias.asname or top] = alias.name if alias.asname else top
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    self._imports[alias.asname or alias.name] = f"{module}.{alias.name}"
            case _:
                pass

    def _note_declaration(self, node: ast.AST) -> None:
        match node:
            case ast.arg(arg=name, annotation=annotation):
                # A parameter belongs to the function: arg -> arguments -> function.
                self._note_name(self._parents[self._parents[node]], name, _kind_of_annotation(annotation))
            case ast.AnnAssign(target=target, annotation=annotation):
                self._note_target(target, _kind_of_annotation(annotation))
                if isinstance(target, ast.Name):
                    self._declared.add((self._scope(target), target.id))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if isinstance(self._parents.get(node), ast.Module):
                    self._assigned.add(name)
            case _:
                pass

    def _note_binding(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=parts)], value=ast.Await(value=ast.Call(func=waits))) if (
                self.qualified(waits) == "asyncio.wait"
            ):
                for part in parts:  # done, pending = await asyncio.wait(...)
                    self._note_target(part, "set")
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._note_target(target, self._kind(value))
            case ast.NamedExpr(target=target, value=value):
                self._note_target(target, self._kind(value))
            case ast.For(target=target) | ast.AsyncFor(target=target):
                self._note_target(target, "")
            case _:
                pass

    def _note_target(self, target: ast.expr, kind: str) -> None:
        match target:
            case ast.Name(id=name):
                if isinstance(self._parents.get(self._parents[target]), ast.ClassDef):
                    self._attributes.setdefault(name, set()).add(kind)  # a field, used as self.name
                elif (self._scope(target), name) not in self._declared:
                    self._note_name(self._scope(target), name, kind)
            case ast.Attribute(attr=attr):
                known = self._attributes.get(attr)
                if kind or not known:  # `self.x = other` says nothing about an annotated field
                    self._attributes.setdefault(attr, set()).add(kind)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._note_target(part, "")
            case _:
                pass

    def _note_name(self, scope: ast.AST, name: str, kind: str) -> None:
        assert isinstance(scope, Scope)
        self._assigned.add(name)
        self._names.setdefault((scope, name), set()).add(kind)

    def _scope(self, node: ast.AST) -> Scope:
        for around in enclosing(node, self):
            if isinstance(around, Scope):
                return around
        return self._tree


def _only(kinds: set[str] | None) -> str:
    return next(iter(kinds)) if kinds is not None and len(kinds) == 1 else ""


def _is_keys_view(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"keys", "items"}
    )


def _kind_of_type_name(name: str) -> str:
    if name in SET_TYPES:
        return "set"
    return "path" if name in PATH_TYPES else ""


def _kind_of_annotation(annotation: ast.expr | None) -> str:
    match annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _kind_of_type_name(name)
        case ast.Subscript(value=value, slice=inner):
            outer = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            return (
                _kind_of_annotation(inner) if outer in {"Final", "ClassVar"} else _kind_of_annotation(value)
            )
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):  # set[int] | None
            return _kind_of_annotation(left) or _kind_of_annotation(right)
        case ast.Constant(value=str(text)):
            return _kind_of_annotation(ast.parse(text, mode="eval").body)
        case _:
            return ""

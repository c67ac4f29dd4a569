"""Planted violations of the countable house style."""

import ast

import pytest

from lint import house_style
from lint.house_style import MAX_FUNCTION_LINES, MAX_MODULE_LINES
from lint.sources import parse

DOC = '"""What it is for."""\n'


def rules(text: str, path: str = "broker/magnetar/broker/planted.py") -> list[str]:
    """The rules that a file with this text breaks."""
    return [f.rule for f in house_style.check(parse(text, path))]


def function(lines: int, *, docstring: int = 0) -> str:
    """A function of so many lines, with a docstring of so many more."""
    text = ['    """First.', *[""] * (docstring - 2), '    """'] if docstring else []
    return "\n".join(["def f():", *text, *["    x = 1"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("lines", "found"), [(MAX_MODULE_LINES, []), (MAX_MODULE_LINES + 1, ["module-length"])]
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_module_length(lines: int, found: list[str], end: str) -> None:
    assert rules(DOC + "\n".join(["x = 1"] * (lines - 1)) + end) == found


@pytest.mark.parametrize(
    ("lines", "found"), [(MAX_FUNCTION_LINES, []), (MAX_FUNCTION_LINES + 1, ["function-length"])]
)
@pytest.mark.parametrize("docstring", [0, 30])
def test_function_length_without_its_docstring(lines: int, found: list[str], docstring: int) -> None:
    assert rules(DOC + function(lines, docstring=docstring)) == found


def test_methods_and_coroutines_are_counted() -> None:
    method = "\n".join("    " + line for line in ("async " + function(MAX_FUNCTION_LINES + 1)).splitlines())
    assert rules(f"{DOC}class A:\n{method}\n") == ["function-length"]


def test_function_lines_of_a_one_liner() -> None:
    node = ast.parse("def f(): return 1").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert house_style.function_lines(node) == 1


def test_module_docstring() -> None:
    assert rules("x = 1\n") == ["module-docstring"]
    assert rules("") == []


@pytest.mark.parametrize("name", ["LedgerManager", "CursorImpl", "TopicHelper", "TopicUtils"])
def test_empty_class_names(name: str) -> None:
    assert rules(f"{DOC}class {name}: ...\n") == ["empty-name"]


def test_names_of_the_field_are_fine() -> None:
    assert rules(f"{DOC}class ManagedLedger: ...\nclass Managers: ...\n") == []


def test_empty_module_names() -> None:
    assert rules(DOC, "broker/magnetar/broker/utils.py") == ["empty-name"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("See MetadataStore.", ["empty-docstring"]),
        ("See `DiskWorker`.", ["empty-docstring"]),
        ("See the module.", []),
    ],
)
def test_a_docstring_that_only_names_a_protocol(text: str, found: list[str]) -> None:
    assert rules(f'{DOC}def f():\n    """{text}"""\n    return 1\n') == found
    assert rules(f'{DOC}def f():\n    """{text}"""\n') == [], "there must be something"


def test_every_exception_has_a_reason() -> None:
    for line in house_style.ALLOWED:
        assert len(line.reason.split()) >= 3, line
        assert line.rules <= house_style.RULES

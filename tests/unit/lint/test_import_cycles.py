"""The search for import cycles, on small graphs and on the rooms themselves."""

import ast

from lint.import_cycles import find_cycles, import_graph, imported_by_name


def test_a_chain_and_a_shared_import_are_no_cycle() -> None:
    assert find_cycles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_two_modules_that_import_each_other() -> None:
    assert find_cycles({"a": ["b"], "b": ["a", "c"], "c": []}) == [["a", "b"]]


def test_a_circle_of_three_is_one_group_and_a_second_circle_another() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "x"], "x": ["y"], "y": ["x"]}
    assert find_cycles(graph) == [["a", "b", "c"], ["x", "y"]]


def test_two_circles_that_share_a_module_are_one_group() -> None:
    assert find_cycles({"a": ["b", "c"], "b": ["a"], "c": ["a"]}) == [["a", "b", "c"]]


def test_the_graph_knows_every_room() -> None:
    graph = import_graph()
    assert "magnetar.proto.frames" in graph["magnetar.runtime.connection.connection"]
    assert {module.split(".")[1] for module in graph} >= {"proto", "bookie", "broker", "client", "cli"}


def test_an_import_by_name_is_an_import() -> None:
    graph = import_graph()
    assert "magnetar.bookie.public" in graph["magnetar.bookie"]
    assert "magnetar.bookie.shell" in graph["magnetar.cli.wiring.daemons"]
    code = """
importlib.import_module("a.b")
import_module(".c", __name__)
await import_in_thread("d", *more)
bind(port, imports=("e.f",) if bookie else ())
print("no import")
"""
    tree = ast.parse(code.replace("await ", ""))
    assert list(imported_by_name(tree, "pack")) == ["a.b", "pack.c", "d", "e.f"]

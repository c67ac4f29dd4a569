"""Which test modules are near a change: support.near."""

from support.near import imports_of, near


def test_imports_count_as_the_module_and_as_what_may_be_one() -> None:
    text = "import a.b\nfrom c import d\n\ndef late():\n    from e.f import g\n"
    assert imports_of(text) == {"a.b", "c", "c.d", "e.f", "e.f.g"}


def test_near_are_changed_tests_and_those_that_import_the_change_or_its_importers() -> None:
    texts = {
        "broker/magnetar/broker/core.py": "",
        "broker/magnetar/broker/__init__.py": "from magnetar.broker.core import Core",
        "client/magnetar/client/other.py": "",
        "tests/unit/test_itself.py": "from magnetar.broker.core import Core",
        "tests/unit/test_through_the_package.py": "from magnetar.broker import Core",
        "tests/unit/test_changed.py": "",
        "tests/unit/test_other.py": "import magnetar.client.other",
        "tests/support/kit.py": "from magnetar.broker import Core",
    }
    assert near(["broker/magnetar/broker/core.py", "tests/unit/test_changed.py"], texts) == [
        "tests/unit/test_changed.py",
        "tests/unit/test_itself.py",
        "tests/unit/test_through_the_package.py",
    ]


def test_nothing_is_near_no_change() -> None:
    assert near([], {"tests/unit/test_a.py": "import a"}) == []

"""URLs of a ZooKeeper ensemble."""

import pytest

from magnetar.metadata.zookeeper.address import ZooKeeperAddress, parse_address
from magnetar.proto.errors import InvalidSetting


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("zk://a", ZooKeeperAddress((("a", 2181),))),
        ("zk://a:1,b,[::1]:3,[::2]", ZooKeeperAddress((("a", 1), ("b", 2181), ("::1", 3), ("::2", 2181)))),
        ("zk://a/root/deep/", ZooKeeperAddress((("a", 2181),), "/root/deep")),
        ("zk://a/", ZooKeeperAddress((("a", 2181),))),
        ("zk+tls://u:p%2F%40@a/r", ZooKeeperAddress((("a", 2181),), "/r", "u:p/@", True)),
        ("zk://u:p:@:q@a/r", ZooKeeperAddress((("a", 2181),), "/r", "u:p:@:q")),
    ],
)
def test_addresses(text: str, want: ZooKeeperAddress) -> None:
    assert parse_address(text) == want
    assert parse_address(str(want).replace("u@", "u:p%2F%40@")).hosts == want.hosts


@pytest.mark.parametrize(
    "text",
    [
        "", "a:2181", "http://a", "zk://", "zk://a,", "zk://a:0", "zk://a:70000", "zk://a:x", "zk://::1", "zk://[::1",
        "zk://[::1]2181", "zk://a//b", "zk://a/../b", "zk://a/b%20c", "zk://a/\U00020000", "zk://secret@a", "zk://:secret@a",
    ],
)  # fmt: skip
def test_mistakes(text: str) -> None:
    with pytest.raises(InvalidSetting) as failure:
        parse_address(text)
    assert failure.value.message.startswith("setting metadata: ")
    assert failure.value.details["setting"] == "metadata"
    assert "secret" not in failure.value.message


def test_the_password_is_not_shown() -> None:
    assert str(parse_address("zk+tls://me:secret@[::1],b:9/r")) == "zk+tls://me@[::1]:2181,b:9/r"

"""Avro's schemas where fastavro is installed, and one clear error where it is not: other value formats do without it."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from magnetar.proto.errors import InvalidArgument

if TYPE_CHECKING:
    from .avro import AvroSchema


def derived_schema(fields: pa.DataType) -> Any:
    """A schema of Avro that would do for these. Raises InvalidArgument if there is none."""
    try:
        from .avro import derived
    except ModuleNotFoundError as missing:
        raise _not_installed(missing) from None
    return derived(fields)


def avro_schema(text: str) -> AvroSchema:
    """Of the option value_schema. Raises InvalidArgument."""
    try:
        from .avro import AvroSchema
    except ModuleNotFoundError as missing:
        raise _not_installed(missing) from None
    return AvroSchema(text)


def _not_installed(missing: ModuleNotFoundError) -> InvalidArgument:
    return InvalidArgument(
        f"option value_format is 'avro', and {missing.name} is not installed on {platform.node()}, in {sys.prefix}; "
        "install it there (it comes with magnetar[spark])"
    )

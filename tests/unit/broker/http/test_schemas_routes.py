"""Schemas over HTTP, as a Pulsar 4.0.6 answered the same requests; what differs is in docs/schemas.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.admin_kit import Admin, administered

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
NAME = {"name": "name", "type": ["null", "string"]}
AGE = {"name": "age", "type": ["null", "int"]}
TOWN = {"name": "town", "default": None, "type": ["null", "string"]}


def person(*fields: Any) -> str:
    return json.dumps({"type": "record", "name": "Person", "fields": fields})


def payload(kind: str, schema: str = "", **properties: str) -> dict[str, Any]:
    return {"type": kind, "schema": schema, "properties": properties}


FIRST, MORE = payload("JSON", person(NAME, AGE), k="v"), payload("JSON", person(NAME, AGE, TOWN))
REFUSED = [
    (payload("STRING"), 409),
    (payload("AVRO", person(NAME, AGE)), 409),
    (payload("JSON", person({"name": "age", "type": "string"})), 409),
    (payload("JSON", "no"), 422),
    (payload("STRING", "abc"), 422),
    (payload("AUTO_CONSUME"), 422),
    (payload("KEY_VALUE", "x"), 422),
    (payload("NOPE"), 422),
    ({}, 400),
]


async def test_as_pulsar_answers() -> None:
    async with administered() as admin:

        async def answers(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            answered = await admin(method, f"schemas/public/default/{path}", body)
            return answered.status, answered.body

        assert (await answers("GET", "none/schema"))[0] == 404
        assert await answers("GET", "none/schemas") == (200, {"getSchemaResponses": []})
        assert await answers("GET", "none/metadata") == (200, None)
        assert await answers("POST", "none/version", payload("STRING")) == (200, {"version": -1})
        fits = {"schemaCompatibilityStrategy": "FULL", "compatibility": True}
        assert await answers("POST", "none/compatibility", payload("STRING")) == (202, fits)
        assert await answers("DELETE", "none/schema") == (200, {"version": 0})

        for body, version in ((FIRST, 0), (payload("JSON", person({**NAME, "doc": "x"}, AGE)), 0), (MORE, 1)):
            assert await answers("POST", "t/schema", body) == (200, {"version": {"version": version}})
        shown = {
            "version": 0, "type": "JSON", "timestamp": 1_000_000, "data": FIRST["schema"], "properties": {"k": "v"},
        }  # fmt: skip
        assert await answers("GET", "t/schema/0") == (200, shown)
        assert (await answers("GET", "t/schema"))[1]["version"] == 1
        assert (await answers("GET", "t/schema/7"))[0] == 404
        status, found = await answers("GET", "t/schemas")
        assert [one["version"] for one in found["getSchemaResponses"]] == [0, 1]
        assert (await answers("GET", "t/metadata"))[1]["info"]["version"] == 1
        assert await answers("POST", "t/version", FIRST) == (200, {"version": 0})
        for body, status in REFUSED:
            assert (await answers("POST", "t/schema", body))[0] == status, body
            assert (await answers("POST", "t/compatibility", body))[0] == status, body
        assert await answers("DELETE", "t/schema") == (200, {"version": 2})
        assert await answers("DELETE", "t/schema") == (200, {"version": 3})
        assert (await answers("GET", "t/schema/0"))[0] == 404
        assert await answers("POST", "t/schema", payload("STRING")) == (200, {"version": {"version": 4}})
        assert await answers("DELETE", "t/schema?force=true") == (200, {"version": -1})
        assert await answers("POST", "t/schema", payload("STRING")) == (200, {"version": {"version": 0}})
        await _keys_with_values(admin)


async def _keys_with_values(admin: Admin) -> None:
    path, text = (
        "schemas/public/default/pairs/schema",
        json.dumps({"key": "", "value": json.loads(person(NAME))}),
    )
    given = payload("KEY_VALUE", text, **{"key.schema.type": "STRING", "value.schema.type": "JSON"})
    assert (await admin("POST", path, given)).body == {"version": {"version": 0}}
    found = (await admin("GET", path)).body
    assert json.loads(found["data"]) == json.loads(text)
    stored = await admin.broker.metadata.get("/schemas/public/default/pairs/0000000000")
    assert stored is not None
    value = person(NAME).replace(" ", "").encode()
    assert bytes(4) + len(value).to_bytes(4, "big") + value in stored.value

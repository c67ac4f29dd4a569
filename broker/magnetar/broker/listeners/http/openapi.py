"""The routes as OpenAPI 3.1, and a page of them."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

import msgspec

from .routes import Argument, Route


def document(rows: Iterable[Route], version: str) -> dict[str, Any]:
    """`/openapi.json`."""
    paths: dict[str, Any] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row)
    about = "Paths, JSON and statuses are those of Apache Pulsar 4.0. Errors are {'reason': text}."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Magnetar", "version": version, "description": about},
        "paths": paths,
    }


def _operation(row: Route) -> dict[str, Any]:
    by_place: dict[str, list[Argument]] = {"path": [], "query": [], "body": [], "key": []}
    for one in row.arguments:
        by_place[one.place].append(one)
    known = {one.asked: one.type for one in by_place["path"]}
    in_path = [part[1:-1] for part in row.path.split("/") if part[:1] == "{"]
    parameters = [(name, "path", True, known.get(name, str)) for name in in_path]
    parameters += [(one.asked, "query", one.required, one.type) for one in by_place["query"]]
    schema = {"type": "object", "properties": {one.asked: _schema(one.type) for one in by_place["key"]}}
    for one in by_place["body"]:
        schema = _schema(one.type)
    body = {"content": {"application/json": {"schema": schema}}} if row.body else None
    return {
        "summary": row.doc,
        "parameters": [
            {"name": name, "in": place, "required": required, "schema": _schema(type)}
            for name, place, required, type in parameters
        ],
        **({"requestBody": body} if body else {}),
        "responses": {str(row.status or (200 if row.method == "GET" else 204)): {"description": "Done."}},
    }


def _schema(type: Any) -> dict[str, Any]:
    """Inline."""
    (schema,), parts = msgspec.json.schema_components([type], ref_template="{name}")
    found: dict[str, Any] = parts.get(schema.get("$ref", ""), schema)
    return found


def page(rows: Iterable[Route]) -> str:
    """`/openapi.html`: what there is, for people."""
    lines = "".join(
        f"<tr><td>{row.method}<td><code>{html.escape(row.path)}</code><td>{html.escape(row.doc)}"
        for row in sorted(rows, key=lambda row: (row.path, row.method))
    )
    return (
        "<!doctype html><meta charset=utf-8><title>Magnetar</title>"
        "<style>body{font:15px sans-serif;margin:2em}td{padding:2px 12px;vertical-align:top}</style>"
        '<h1>Magnetar</h1><p><a href="/metrics">metrics</a> <a href="/health">health</a> '
        f'<a href="/openapi.json">openapi.json</a><table>{lines}</table>'
    )

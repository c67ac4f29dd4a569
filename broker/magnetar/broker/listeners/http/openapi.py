"""The routes as OpenAPI 3.1, and a page of them."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

import msgspec

from .routes import REFUSED, Argument, Route


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
    in_path = [part[1:-1] for part in row.path.split("/") if part[:1] == "{"]
    types = {one.asked: one.type for one in row.arguments if one.place == "path"}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _schema(types.get(name, str))}
        for name in in_path
    ]
    parameters += [
        {"name": one.asked, "in": "query", "required": one.required, "schema": _schema(one.type)}
        for one in row.arguments
        if one.place == "query"
    ]
    body = next((one for one in row.arguments if one.place == "body"), None)
    answers = {str(row.status or (200 if row.method == "GET" else 204)): {"description": "Done."}}
    if row.of_topic and row.partitions is REFUSED:
        answers["405"] = {"description": "Not possible of a partitioned topic as a whole."}
    return {
        "summary": row.doc,
        "parameters": parameters,
        **({} if body is None else {"requestBody": _body(body)}),
        "responses": answers,
    }


def _body(argument: Argument) -> dict[str, Any]:
    content = {"application/json": {"schema": _schema(argument.type)}}
    return {"required": argument.required, "content": content}


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

# SPDX-License-Identifier: Apache-2.0
"""Kubeconfigs, and responses of a server."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from kbpf.source.api.transport import ApiConnection
from tests.support.faults.scripted import Exchange, ScriptedServer

URL = "https://192.0.2.1:6443"


def write(path: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None):
    """Writes a kubeconfig with one context, cluster and user."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": URL} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def exec_user(tmp_path, script: str) -> dict[str, Any]:
    """The user of a kubeconfig whose exec plugin, `tmp_path`/plugin, is this shell script."""
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\n{script}\n")
    plugin.chmod(0o755)
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    return {"exec": command | {"interactiveMode": "Never"}}


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def ok(exchange: Exchange) -> None:
    exchange.answer(200, {})


def unauthorized(exchange: Exchange) -> None:
    exchange.answer(401, {})


Connect = Callable[..., ApiConnection]


def headers(server: ScriptedServer) -> list[str | None]:
    return [request.headers.get("authorization") for request in server.requests]

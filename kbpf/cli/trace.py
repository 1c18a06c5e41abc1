# SPDX-License-Identifier: Apache-2.0
"""`kbpf trace FROM TO`: what happens to a connection on this node, step by step, and why."""

import contextlib
import re
import sys
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, ConfigFile, Output, OutputOption, PinDir, StateDir
from kbpf.errors import NotFoundError, ObjectError
from kbpf.kernel.system import pods
from kbpf.model.address import Addr, parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.inspection import Inspection, parse_place
from kbpf.model.objects import Protocol
from kbpf.views import trace as view
from kbpf.views.trace import Client, Origin

PORTS: Final = {"http": 80, "https": 443}

From = Annotated[
    str,
    typer.Argument(
        metavar="FROM",
        help="host, outside, an IP of a client outside, or NAMESPACE/NAME of a Pod of this node.",
    ),
]
To = Annotated[
    str,
    typer.Argument(
        metavar="TO",
        help="IP:PORT[/udp], NAMESPACE/NAME[:PORT] of a Service, or a URL.",
    ),
]


def trace(
    source: From, to: To, output: OutputOption = Output.TABLE, config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir, state_dir: StateDir = DEFAULT.state_dir,
) -> None:  # fmt: skip
    """Explain a connection: who sees it, which Service it is for, which backends it may reach, and
    why. Reads what is programmed on this node, and sends nothing.
    """
    from kbpf.dataplane import inspect as dataplane

    client = parse_client(source)
    locations = dataplane.Locations(pin_dir, state_dir / DEFAULT.ipvs_device)
    inspection = dataplane.read(locations, view.NEEDS, bpf_only=True)
    traces = [
        view.build_trace(inspection, client, target)
        for target in find_targets(inspection, to, client.origin)
    ]
    page = view.build_page(traces, _age_note(inspection))
    sys.stdout.writelines(render.render_page(page, output))
    for note in filter(None, page.notes):
        print(f"kbpf: {note}", file=sys.stderr)


def parse_client(text: str) -> Client:
    """The client that FROM names. Raises NotFoundError for a Pod that is not on this node."""
    if text in (Origin.HOST, Origin.OUTSIDE):
        return Client(Origin(text))
    with contextlib.suppress(ObjectError):
        return Client(Origin.OUTSIDE, address=parse_addr(text))
    names = pods.list_pod_names()
    uids = [uid for uid, name in names.items() if text in (name, name.partition("/")[2])]
    if not uids:
        raise NotFoundError(
            f"no Pod {text} is on this node",
            str(pods.LOG_FOLDER),
            "`kubectl get pods -A -o wide` shows the node of each Pod: run this there",
        )
    return Client(Origin.POD, names[uids[0]], pods.find_cgroup_ids(uids[0]))


def find_targets(inspection: Inspection, text: str, origin: Origin) -> list[FrontendAddress]:
    """What TO means. Raises typer.BadParameter, or NotFoundError for a Service."""
    if "://" in text:
        text = _from_url(text)
    place_text, _, name = text.partition("/") if text.count("/") == 1 else (text, "", "")
    protocol = Protocol.__members__.get(name.upper())
    if (place := parse_place(place_text if protocol else text)) is None:
        return view.find_targets(inspection, text, origin)
    address, port = place
    if address is None or not 0 < port < 65536:
        raise typer.BadParameter(f"{text} needs an address and a port, as in 10.96.0.1:80",
                                 param_hint="TO")  # fmt: skip
    return [FrontendAddress(Addr(address), port, protocol or Protocol.TCP)]


def _from_url(text: str) -> str:
    url = urlsplit(text)
    host, port = url.hostname or "", url.port or PORTS.get(url.scheme, 0)
    if not host or not port:
        raise typer.BadParameter(f"{text} has no host, or no known port", param_hint="TO")
    if match := re.fullmatch(r"([^.]+)\.([^.]+)(\.svc(\..*)?)?", host):
        with contextlib.suppress(ObjectError):
            parse_addr(host)
            return f"{host}:{port}"
        return f"{match[2]}/{match[1]}:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _age_note(inspection: Inspection) -> str:
    status = inspection.status
    if status is None or inspection.agent_alive:
        return ""
    age = int(inspection.boottime - status.heartbeat)
    return f"the agent does not run: this is what it has programmed, {age} s ago"

"""Flags, environment and file → the Config, and what there is to tell about them.

Who wins:
- A flag beats its variable, and that beats the file.
- But kube-proxy's own flags, and their variables, do nothing where the file has kube-proxy's own
  document: so it is with kube-proxy's --config, and its DaemonSets count on it. What was ignored is
  named in one line.
- Of the file's two documents ours wins where both say something (localhostNodePorts, logLevel).
"""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from kbpf.config import documents, durations, kbpf_configuration, kubeproxy, parsers
from kbpf.config.diagnostic import Note
from kbpf.config.documents import KUBE_PROXY, OWN, Documents, Findings
from kbpf.config.flags import BY_NAME, FLAGS, KUBE_PROXYS
from kbpf.config.kbpf_configuration import KbpfConfiguration
from kbpf.config.kubeproxy import KubeProxyConfiguration
from kbpf.config.values import Values
from kbpf.errors import ConfigError, ConfigErrors
from kbpf.model.address import family_of
from kbpf.model.config import (
    CONNTRACK_MOST,
    Config,
    Conntrack,
    IpvsTimes,
    LocalMode,
    MapSizes,
    Serving,
    SocketLb,
)

LEAST_CONNECTIONS: Final = 1000
"""A new one asks up to 32 of the oldest whether they are needed: there have to be many more."""
LONGEST_FILE: Final = 16 << 20
"""Bytes that are read of a configuration file; bounded_yaml.CONFIGURATION refuses fewer."""
FILE_VARIABLE: Final = "KBPF_CONFIG"
NODE_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
NODE_PORTS: Final = range(30_000, 32_768)
"""Where an API server takes NodePorts from, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and the lines for the log. `node_name` is "" when nobody said it. `places`:
    where each field was said.
    """

    config: Config
    notes: tuple[Note, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)


def read_file(path: Path) -> bytes:
    """The text of a configuration file. documents.py refuses what is longer than a little."""
    try:
        with path.open("rb") as file:
            return file.read(LONGEST_FILE)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration: {error.strerror}", str(path), "give --config FILE"
        ) from error


def config(given: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """The Config that these flags ({name: text}) and variables say."""
    return load(given, environ).config


def load(
    given: Mapping[str, str],
    environ: Mapping[str, str],
    data: bytes | None = None,
    where: str = "--config",
) -> Loaded:
    """The same with the text of a file, which comes from `where`. Raises ConfigErrors; ConfigError
    for a file that cannot be taken apart.
    """
    said = documents.parse(data, where) if data is not None else Documents()
    found = Findings(notes=list(said.notes))
    made = Values()
    if said.kube_proxy is not None:
        proxy = documents.decode(KubeProxyConfiguration, said.kube_proxy, KUBE_PROXY, found)
        made.take(kubeproxy.settings(proxy))
        found.notes += kubeproxy.notes(proxy)
    if said.own is not None:
        ours = documents.decode(KbpfConfiguration, said.own, OWN, found, strict=True)
        made.take(kbpf_configuration.settings(ours))
    made.take(_flags(given, environ, said.kube_proxy is not None, found.notes))
    errors = (*found.errors, *made.errors)
    if not errors:
        result = _config(made)
        errors = tuple(_contradictions(result, made))
    if errors:
        warnings = tuple(note.text for note in found.notes if note.is_warning)
        raise ConfigErrors(errors, warnings, made.get("log_format", Config().log_format))
    return Loaded(result, (*found.notes, *_notes(result, made)), made.places)


def _flags(
    given: Mapping[str, str], environ: Mapping[str, str], has_file: bool, notes: list[Note]
) -> Values:
    """What flags and variables say. `has_file`: kube-proxy's document is there."""
    made = Values()
    ignored: list[str] = []
    notes += _unknown_variables(environ)
    for flag in FLAGS:
        if given.get(flag.name) or (flag.name in given and flag.may_be_empty):
            place, text = flag.name, given[flag.name]
        elif flag.field and environ.get(flag.variable):
            place, text = flag.variable, environ[flag.variable]
        else:
            continue
        if has_file and flag.name in KUBE_PROXYS:
            ignored.append(place)
        elif not flag.field:
            notes.append(Note(f"{place} is accepted and not used: {flag.help}"))
        else:
            made.read(flag.field, place, text, flag.read)
            if flag.read is parsers.feature_gates:
                notes += _other_gates(place, text)
    if ignored:
        notes.append(
            Note(
                f"ignored, as kube-proxy does with --config: {', '.join(ignored)}; say it in the "
                f"file's {KUBE_PROXY}",
                is_warning=True,
            )
        )
    return made


SERVICE_LINK: Final = re.compile(r"KBPF(_[A-Z0-9]+)*_(SERVICE_(HOST|PORT)|PORT)(_[A-Z0-9_]+)?")
"""What kubelet sets for a Service whose name begins with kbpf."""
NOT_OURS: Final = ("KBPF_TEST_", "KBPF_BENCH_")
"""Variables of the project's own tests."""


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[Note]:
    known = {flag.variable: flag.name for flag in FLAGS if flag.field} | {FILE_VARIABLE: "--config"}
    for name in sorted(environ):
        if not name.startswith("KBPF_") or name in known or name.startswith(NOT_OURS):
            continue
        if not SERVICE_LINK.fullmatch(name):
            near = difflib.get_close_matches(name, known, 1, 0.75)
            meant = f"is {near[0]} meant?" if near else "it is not used"
            yield Note(f"{name} is no variable that is known; {meant}", is_warning=True)


def _other_gates(place: str, text: str) -> Iterator[Note]:
    with contextlib.suppress(ConfigError):  # which is told already
        if others := sorted(parsers.gates(text, place).keys() - {parsers.EXTERNAL_IPS_GATE}):
            yield Note(f"{place}: {', '.join(others)} is accepted and not used")


def _config(made: Values) -> Config:
    """The fields put together, with what follows from others."""
    parts: dict[str, Any] = {
        "sizes": MapSizes(), "serving": Serving(), "conntrack": Conntrack(),
        "ipvs_times": IpvsTimes(),
    }  # fmt: skip
    for name, value in made.found.items():
        part, dot, of = name.partition(".")
        if dot:
            parts[part] = replace(parts[part], **{of: value})
    plain = {k: v for k, v in made.found.items() if "." not in k and k != "node_ports"}
    result = Config(**plain, **parts)
    as_proxy = "all" if result.proxy_mode in ("iptables", "ipvs") else "primary"
    match made.get("node_ports", as_proxy):
        case "all":
            result = replace(result, all_node_port_addresses=True)
        case tuple(said):
            networks = tuple(each for each in said if each != "primary")
            beside = bool(networks) and "primary" in said
            result = replace(result, node_port_addresses=networks, primary_node_ports=beside)
    if result.cluster_cidrs and not result.detect_local_mode:
        result = replace(result, detect_local_mode=LocalMode.CLUSTER_CIDR)
    return result


NEEDS: Final = {
    LocalMode.BRIDGE: "--pod-bridge-interface",
    LocalMode.PREFIX: "--pod-interface-name-prefix",
}
"""The flag without which a mode is refused. ClusterCIDR without a network detects nothing, as
with kube-proxy, whose configuration files often have it so."""


def _contradictions(made: Config, said: Values) -> Iterator[ConfigError]:
    """What does not go together."""
    place = _placing(said)
    if made.source is not None and (made.kubeconfig is not None or made.master):
        yield ConfigError(
            "a folder and an API server cannot both be the source",
            place("source"),
            "leave out --source, or --kubeconfig and --master",
        )
    if made.sizes.connections < LEAST_CONNECTIONS:
        yield ConfigError(
            f"too few connections: {made.sizes.connections}",
            place("sizes.connections"),
            f"give {LEAST_CONNECTIONS} or more: with few, those that are in use have to go",
        )
    if made.min_sync_period > made.serving.late_seconds / 2:
        yield ConfigError(
            f"longer than --sync-period, {durations.write(made.serving.late_seconds / 2)}",
            place("min_sync_period"),
            "changes that wait for their turn would make the agent unhealthy",
        )
    yield from _shared_port(made, place)
    for mode, name in NEEDS.items():
        if made.detect_local_mode is mode and not getattr(made, BY_NAME[name].field):
            yield ConfigError(
                f"{mode} says nothing by itself", place("detect_local_mode"), f"add {name}"
            )
    if made.socket_lb is not SocketLb.ON and not made.packet_path:
        yield ConfigError(
            f"with --socket-lb {made.socket_lb} the packet path must be on",
            place("socket_lb"),
            "leave out --packet-path false, or --socket-lb",
        )


WILDCARDS: Final = frozenset(("0.0.0.0", "[::]"))
"""Either listens on all addresses of both families (serve/http.py)."""


def _shared_port(made: Config, place: Callable[[str], str]) -> Iterator[ConfigError]:
    """Addresses of which the second one to be listened on would find its port in use."""
    listens = [
        (field, *each.rpartition(":")[::2])
        for field in ("serving.healthz", "serving.metrics")
        for each in getattr(made.serving, field.partition(".")[2]).split(",")
        if each
    ]
    for (one, first, port), (other, second, its_port) in combinations(listens, 2):
        if port == its_port and (first == second or {first, second} & WILDCARDS):
            yield ConfigError(
                f"{first}:{port} and {second}:{port} cannot both be listened on",
                place(one) if one == other else f"{place(one)}, {place(other)}",
                "give one of them another port",
            )


def _notes(made: Config, said: Values) -> Iterator[Note]:
    """What is probably not meant."""
    place = _placing(said)
    if made.proxy_mode == "ipvs":
        yield Note(
            f"{place('proxy_mode')}: kube-proxy's mode ipvs is deprecated: 1.40 refuses it by "
            "default, 1.43 no longer has it; kbpf's own mode ipvs stays",
            is_warning=True,
            event="IPVSDeprecation",
        )
    low, high = made.masquerade_ports
    if made.packet_path and low < NODE_PORTS.stop and high >= NODE_PORTS.start:
        yield Note(
            f"{place('masquerade_ports')} {low}-{high} meets {NODE_PORTS.start}-"
            f"{NODE_PORTS.stop - 1}, where API servers take NodePorts from: a client of the one "
            "may be taken for a client of the other; choose ports below or above",
            is_warning=True,
        )
    if made.node_name and not NODE_NAME.fullmatch(made.node_name):
        yield Note(
            f"{place('node_name')}: no Node can have the name {made.node_name!r} (a-z, 0-9, - and "
            "., 253 characters at most): no endpoint counts as one of this node",
            is_warning=True,
        )
    for device in sorted({*made.devices} & {*made.excluded_devices}):
        yield Note(
            f"{place('devices')} and {place('excluded_devices')} both name {device}: it is left "
            "out",
            is_warning=True,
        )
    if made.conntrack.max_per_core > CONNTRACK_MOST:
        yield Note(
            f"{place('conntrack.max_per_core')}: {made.conntrack.max_per_core} counts as "
            f"{CONNTRACK_MOST}, which is the most for all cores together",
            is_warning=True,
        )
    families = {family_of(cidr.address) for cidr in made.node_port_addresses}
    other_is_all = len(families) == 1 and not made.primary_node_ports
    if other_is_all and len({family_of(cidr.address) for cidr in made.cluster_cidrs}) == 2:
        yield Note(
            f"{place('node_ports')} has IPv{families.pop()} networks only, and pods have addresses "
            "of both families: NodePorts answer on all addresses of the other",
            is_warning=True,
        )
    if made.cluster_cidrs and made.detect_local_mode is not LocalMode.CLUSTER_CIDR:
        yield Note(
            f"{place('cluster_cidrs')} is not used: pods are told by {made.detect_local_mode}"
        )


def _placing(said: Values) -> Callable[[str], str]:
    """Field → where it was said, or the flag that would say it."""
    names = {flag.field: flag.name for flag in FLAGS}
    return lambda field: said.places.get(field) or names[field]

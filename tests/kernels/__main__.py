# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.kernels [KERNEL...]`: a part of the suite in Debian's kernels.

Compiles the programs on this machine, boots each kernel over the working tree (machine.py), runs
the tests of FEATURES in it, and prints one table: kernel x feature x result. Emulated kernels run
at the same time, one for each processor. Everything is kept in build/kernels: table.json, and the
console and pytest's files of each kernel. Exits with 1 if anything failed, or if a guest hung or
died.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tests.kernels import debian, machine, table
from tests.kernels.table import Feature
from tests.support.build import artifacts, go_build
from tests.support.build.programs import CNI_PLUGINS
from tests.support.features import DEBIAN

BUILD = machine.ROOT / "build" / "kernels"


def _features(text: str) -> tuple[Feature, ...]:
    """A feature for each name. Its lines have a file or folder each, and the tests in that, without `test_`, if those
    are not all.
    """
    tests: dict[str, tuple[str, ...]] = {}
    for name, path, names in re.findall(r"^(\S.*?)  +(\S+?)(?:: (.+))?$", text, re.M):
        own = tuple(f"{path}::test_{each}" for each in names.split("; ")) if names else (path,)
        tests[name] = (*tests.get(name, ()), *own)
    return tuple(Feature(name, found) for name, found in tests.items())


LAB = """
traffic/dials traffic/updates traffic/sctp
outside/north_south agent/source_folder agent/node_life
"""
"""The lab's tests that run in both modes."""


def _of_lab(path: str, mode: str = "") -> Feature:
    """A file of the lab. The feature has its name, after that of the mode if one is given."""
    folder, _, name = path.partition("/")
    files = (f"tests/lab/{folder}/test_{name}.py",)
    return Feature(f"{mode}-{name}", files, mode) if mode else Feature(name, files)


BARE = "ipv6.disable=1 module_blacklist=nf_conntrack,nf_tables,nfnetlink,ip_tables,ip6_tables,x_tables"
"""A node without IPv6 and without netfilter's modules."""

FILES = """
loading        tests/programs/node/test_verifier.py
check          tests/programs/node/test_features.py
tcp            tests/programs/sockets/test_connect.py
udp            tests/programs/sockets/udp
mounts         tests/lab/traffic/test_kernel_sockets.py
mounts         tests/programs/sockets/test_kernel_sockets.py
attaching      tests/programs/packets/tc
attaching      tests/programs/packets/test_devices.py
attaching      tests/programs/packets/test_hook_probe.py
second agent   tests/programs/node/test_second_agent.py
packets        tests/programs/packets/path
lab            tests/lab/outside/test_clsact.py
tunnels        tests/programs/packets/test_tunnels.py
ipvs           tests/programs/ipvs/test_ipvs.py
ipvs           tests/programs/conformance
ipvs           tests/programs/node/test_takeover_cleanup.py
fallback       tests/programs/node/test_fallback.py
ipvs-commands  tests/lab/agent/test_ipvs_commands.py
modes          tests/lab/agent/test_modes.py
rights         tests/programs/sockets/test_sock_destroy.py
rights         tests/programs/node/test_capabilities.py
apparmor       tests/lab/cluster/test_apparmor.py
memory         tests/lab/agent/test_locked_memory.py
takeover       tests/lab/cluster/test_takeover.py
full table     tests/kernels/full_conntrack.py
conntrack      tests/lab/outside/test_conntrack.py
provisioning   tests/host/test_vagrant.py: a_machine_is_provisioned
provisioning   tests/host/test_vagrant.py: a_machine_of_busybox_is_provisioned; a_command_enters_a_root
bridges        tests/lab/outside/test_br_netfilter.py: no_packet_is_invalid[a bridge of pods-tcp v4]
bridges        tests/lab/outside/test_br_netfilter.py: no_packet_is_invalid[a bridge of pods-udp v6]
"""
"""All kinds of bridges take some 20 minutes in an emulator."""
FEATURES = (
    *_features(FILES),
    Feature("bare node", ("tests/kernels/bare_node.py",), boot=BARE),
    Feature(
        "overlays", ("tests/lab/cni/test_cnis.py",), programs=(*go_build.DEFAULT, *CNI_PLUGINS, "flannel", "flanneld")
    ),
    Feature("ipvs-dns_cache", ("tests/lab/neighbours/test_node_local_dns.py",), "ipvs", programs=("coredns",)),
    *(_of_lab(path) for path in LAB.split()),
    *(_of_lab(path, "ipvs") for path in LAB.split()),
)
PROGRAMS = "programs"
MODES = ("bpf", "ipvs")
MINUTES, QUICK_MINUTES = 240, 60
QUICK = _features("""
loading       tests/programs/node/test_verifier.py
check         tests/programs/node/test_features.py: feature_table_matches_this_kernel
check         tests/programs/node/test_features.py: check_rows_report_exactly_the_lacking_features
check         tests/programs/node/test_features.py: check_reports_whether_mode_ipvs_is_usable
provisioning  tests/host/test_vagrant.py: a_machine_of_busybox_is_provisioned
tcp           tests/programs/sockets/test_connect.py: dial
udp           tests/programs/sockets/udp/test_deleted_backend.py: \
connected_sockets_of_a_deleted_backend_are_destroyed[the Service is deleted-pod]
attaching     tests/programs/packets/tc/test_attach.py: program_sees_each_packet_of_its_direction_once
attaching     tests/programs/packets/test_devices.py: chosen_devices_get_their_programs_once_from_each_agent
attaching     tests/programs/packets/test_devices.py: monitor_reports_each_change
ipvs          tests/programs/ipvs/test_ipvs.py: connection_reaches_its_backends
ipvs          tests/programs/ipvs/test_ipvs.py: connection_outlives_its_drained_backend[ClusterIP, outside]
ipvs          tests/programs/ipvs/test_ipvs.py: udp_client_moves_at_once
ipvs          tests/programs/conformance/test_conformance.py: change_is_programmed_in_every_way[ipvs-created]
""")
"""Some tests of some features: seven minutes in emulators, much longer while other tests run."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="tests.kernels", description=__doc__)
    parser.add_argument(
        "kernels",
        nargs="*",
        default=list(debian.SUITES),
        metavar="KERNEL",
        help=f"of {', '.join(debian.SUITES)}; else all",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[f.name for f in FEATURES],
        metavar="FEATURE",
        help=f"of {', '.join(f.name for f in FEATURES)}; else all",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of a kernel")
    parser.add_argument("--refresh", action="store_true", help="look for newer kernel packages")
    parser.add_argument("--quick", action="store_true", help="what `make test` runs")
    given = parser.parse_args()
    if given.quick:
        return report(debian.QUICK, QUICK, min(given.minutes, QUICK_MINUTES), given.refresh)
    if unknown := set(given.kernels) - debian.SUITES.keys():
        parser.error(f"no such kernel: {', '.join(sorted(unknown))}")
    if unknown := set(given.only) - {f.name for f in FEATURES}:
        parser.error(f"no such feature: {', '.join(sorted(unknown))}")
    features = [f for f in FEATURES if f.name in given.only]
    return report(given.kernels, features, given.minutes, given.refresh)


def report(families: Sequence[str], features: Sequence[Feature], minutes: float, refresh: bool) -> int:
    """Boots these kernels, as many at once as there are processors for, and prints the table.
    Returns the exit code.
    """
    # Otherwise guests would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prepare(features)
    kernels = [debian.fetch(family, refresh) for family in families]
    kvm = machine.kvm_boots(kernels[-1], BUILD / "kvm")
    say(f"kvm: {'yes' if kvm else 'no, the emulator'}")
    rows: list[table.Result] = []
    endings: list[str] = []
    # The emulator runs a guest on one processor (machine.EMULATED).
    with ThreadPoolExecutor(1 if kvm else os.cpu_count()) as pool:
        try:
            done = list(pool.map(lambda kernel: run(kernel, features, minutes * 60, kvm), kernels))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            machine.end_all()
            raise
    for kernel, (found, ending) in zip(kernels, done, strict=True):
        rows += found
        if ending.code is None or table.without_result(found):
            endings.append(f"{kernel.family}: {ending.say()}; its console ends so:\n{ending.tail()}")
    (BUILD / "table.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    if text := table.failures(rows):
        say(text)
    # At the end, and in one stream: of a long run often only the last lines are kept.
    print("\n".join((table.page(rows, features), *endings)))
    return int(any(row.result == table.FAILS for row in rows))


def prepare(features: Sequence[Feature]) -> None:
    """Compiles the programs and Python's bytecode, because both take long in an emulator."""
    BUILD.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(BUILD / "artifacts", ignore_errors=True)
    artifacts.copy_to(BUILD / "artifacts")
    copy_programs(features)
    environment = {**os.environ, **pycache()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    tests = {test for feature in features for test in feature.tests}
    subprocess.run(
        [*PYTEST, "-qq", "--collect-only", *tests],
        env=environment,
        cwd=machine.ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
    )


def copy_programs(features: Sequence[Feature]) -> None:
    """Copies the features' Go programs to where the guest reads files with a cache."""
    shutil.rmtree(BUILD / PROGRAMS, ignore_errors=True)
    (BUILD / PROGRAMS).mkdir()
    for name in {name for feature in features for name in feature.programs}:
        shutil.copy(go_build.build(name), BUILD / PROGRAMS)


def pycache() -> dict[str, str]:
    """The environment variable with the folder of Python's bytecode."""
    return {"PYTHONPYCACHEPREFIX": str(BUILD / "pycache")}


def run(
    kernel: debian.Kernel, features: Sequence[Feature], seconds: float, kvm: bool
) -> tuple[list[table.Result], machine.Ending]:
    """Boots a kernel and runs the features' tests in it. Returns a result for each feature, and how
    the guest ended.
    """
    folder = BUILD / kernel.family
    shutil.rmtree(folder, ignore_errors=True)
    cases: list[table.Case] = []
    endings = []
    for number, parameters in enumerate(dict.fromkeys(feature.boot for feature in features)):
        results = folder / str(number) if parameters else folder
        say(f"{kernel.family}: booting {kernel.release} {parameters}".rstrip())
        booted = [feature for feature in features if feature.boot == parameters]
        ending = machine.boot(kernel, command(booted), results, seconds, kvm, parameters)
        say(f"{kernel.family}: {ending.say()}")
        cases += [c for mode in MODES for c in table.read(results / f"junit-{mode}.xml", mode)]
        endings.append(ending)
    worst = next((ending for ending in endings if ending.code is None), endings[-1])
    return table.results(kernel.family, kernel.release, features, cases), worst


def command(features: Sequence[Feature]) -> list[str]:
    """The guest's command: pytest, once for each mode of the lab's agents."""
    return ["sh", "-c", "; ".join(_pytest(mode, features) for mode in MODES)]


def _pytest(mode: str, features: Sequence[Feature]) -> str:
    tests = [test for feature in features if feature.mode == mode for test in feature.tests]
    if not tests:
        return ":"
    variables = {
        **pycache(),
        DEBIAN: "1",
        artifacts.ARTIFACTS: str(BUILD / "artifacts"),
        go_build.ASSETS: str(BUILD / PROGRAMS),
        "KBPF_TEST_MODE": mode,
        "PYTHONDONTWRITEBYTECODE": "1",
        # Otherwise pytest reads every installed package's metadata, for minutes over 9p.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    words = shlex.join(
        [
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            *PYTEST,
            "-v",
            "--tb=short",
            "--color=no",
            "-p",
            "pytest_timeout",
            "-o",
            "junit_family=xunit1",
            *tests,
        ]
    )
    return f'{words} --junitxml="$RESULTS/junit-{mode}.xml"'


def say(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

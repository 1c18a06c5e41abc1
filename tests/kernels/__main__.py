"""`python -m tests.kernels [KERNEL...]`: a part of the suite inside of Debian's kernels.

Compiles the programs here, boots each kernel over the working tree (machine.py), runs the tests of
FEATURES inside, and prints one table: kernel x feature x result. Everything is kept in
build/kernels: table.json, and for each kernel its console and what pytest wrote.
Ends with 1 when anything failed, a guest that hung or died included.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from kbpf.dataplane.bpf import compile
from kbpf.dataplane.bpf.hooks import UNITS
from tests.kernels import debian, machine, table
from tests.kernels.table import Feature
from tests.support.features import DEBIAN
from tests.support.plane import ARTIFACTS

BUILD = machine.ROOT / "build" / "kernels"
FEATURES = (
    Feature("loading", ("tests/programs/test_verifier.py",)),
    Feature("check", ("tests/programs/test_features.py",)),
    Feature("tcp", ("tests/programs/test_connect.py",)),
    Feature("udp", ("tests/programs/test_udp.py",)),
    Feature("attaching", ("tests/programs/test_tc.py", "tests/programs/test_devices.py")),
    Feature("packets", ("tests/programs/test_packets.py",)),
    Feature("lab", ("tests/lab/test_clsact.py",)),
    Feature("sctp", ("tests/lab/test_sctp.py",)),
    Feature("ipvs", ("tests/programs/test_ipvs.py", "tests/programs/test_leftovers.py")),
    Feature("modes", ("tests/lab/test_modes.py",)),
    *(
        Feature(f"ipvs-{name}", (f"tests/lab/test_{name}.py",), "ipvs")
        for name in ("services", "policy", "affinity", "updates", "north_south")
    ),
)
MODES = ("bpf", "ipvs")
MINUTES = 20
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


def main() -> int:
    """Runs it; the exit code."""
    parser = argparse.ArgumentParser(prog="tests.kernels", description=__doc__)
    parser.add_argument("kernels", nargs="*", default=list(debian.SUITES), metavar="KERNEL",
                        help=f"of {', '.join(debian.SUITES)}; else all")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[f.name for f in FEATURES], metavar="FEATURE",
                        help=f"of {', '.join(f.name for f in FEATURES)}; else all")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of a kernel")
    parser.add_argument("--refresh", action="store_true", help="look for newer kernel packages")
    given = parser.parse_args()
    if unknown := set(given.kernels) - debian.SUITES.keys():
        parser.error(f"no such kernel: {', '.join(sorted(unknown))}")
    if unknown := set(given.only) - {f.name for f in FEATURES}:
        parser.error(f"no such feature: {', '.join(sorted(unknown))}")
    features = [f for f in FEATURES if f.name in given.only]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or guests would outlive us
    prepare()
    kernels = [debian.fetch(family, given.refresh) for family in given.kernels]
    kvm = machine.kvm_boots(kernels[-1], BUILD / "kvm")
    say(f"kvm: {'yes' if kvm else 'no, the emulator'}")
    rows: list[table.Result] = []
    for kernel in kernels:
        rows += run(kernel, features, given.minutes * 60, kvm)
    (BUILD / "table.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    print(table.page(rows, features))
    return int(any(row.result == table.FAILS for row in rows))


def prepare() -> None:
    """Compiled programs, and compiled Python: both are slow to make under emulation."""
    BUILD.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(BUILD / "artifacts", ignore_errors=True)
    for unit in UNITS:
        compile.obtain(unit, BUILD / "artifacts")
    environment = {**os.environ, **pycache()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(
        [*PYTEST, "-qq", "--collect-only", "tests"],
        env=environment, cwd=machine.ROOT, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip


def pycache() -> dict[str, str]:
    """Where Python's bytecode is kept."""
    return {"PYTHONPYCACHEPREFIX": str(BUILD / "pycache")}


def run(
    kernel: debian.Kernel, features: list[Feature], seconds: float, kvm: bool
) -> list[table.Result]:
    """Boots a kernel, runs the features' tests inside; a result for each of them."""
    results = BUILD / kernel.family
    shutil.rmtree(results, ignore_errors=True)
    say(f"{kernel.family}: booting {kernel.release}")
    ending = machine.boot(kernel, command(features), results, seconds, kvm)
    say(f"{kernel.family}: {ending.why or 'done'} after {ending.seconds:.0f} s, see {ending.log}")
    if ending.code is None:
        say(tail(ending.log))
    cases = [case for mode in MODES for case in table.read(results / f"junit-{mode}.xml", mode)]
    return table.results(kernel.family, kernel.release, features, cases)


def command(features: list[Feature]) -> list[str]:
    """What runs inside: pytest, once for each mode of the lab's agents."""
    return ["sh", "-c", "; ".join(_pytest(mode, features) for mode in MODES)]


def _pytest(mode: str, features: list[Feature]) -> str:
    tests = [test for feature in features if feature.mode == mode for test in feature.tests]
    if not tests:
        return ":"
    variables = {
        **pycache(),
        DEBIAN: "1",
        ARTIFACTS: str(BUILD / "artifacts"),
        "KBPF_TEST_MODE": mode,
        "PYTHONDONTWRITEBYTECODE": "1",
        # Else pytest reads every installed package's metadata: minutes over 9p.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    words = shlex.join([
        "env", *(f"{name}={value}" for name, value in variables.items()),
        *PYTEST, "-v", "--tb=short", "--color=no", "-p", "pytest_timeout",
        "-o", "junit_family=xunit1", *tests,
    ])  # fmt: skip
    return f'{words} --junitxml="$RESULTS/junit-{mode}.xml"'


def tail(log: Path, lines: int = 40) -> str:
    """The last lines of a console."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def say(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

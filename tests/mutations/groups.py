# SPDX-License-Identifier: Apache-2.0
"""Which Python is mutated, which tests judge it, and how many of a hundred mutants they must
notice; and mutants that no test can notice.
"""

from pathlib import Path
from typing import NamedTuple

from tests.mutations.python import PythonMutant, mutants

ROOT = Path(__file__).parents[2]


def paths_of(suite: str, names: str) -> tuple[str, ...]:
    """Files of a suite without `test_`, and folders, which end in a slash."""
    return tuple(
        f"tests/{suite}/{name}" if name.endswith("/") else f"tests/{suite}/{name.replace('/', '/test_')}.py"
        for name in names.split()
    )


def _values(names: str) -> tuple[str, ...]:
    return paths_of("values", names)


class Group(NamedTuple):
    """Files below the root (or all of a folder), their tests, and the goal in per cent."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    goal: int

    def sources(self) -> list[Path]:
        """The Python files of the group."""
        paths = [ROOT / name for name in self.files]
        return [f for p in paths for f in (sorted(p.glob("*.py")) if p.is_dir() else [p])]

    def mutants(self) -> list[PythonMutant]:
        """All mutants except equivalent ones."""
        return [
            mutant
            for path in self.sources()
            for mutant in mutants(str(path.relative_to(ROOT)), path.read_text())
            if equivalent(mutant) is None
        ]

    def judges(self, mutant: PythonMutant) -> tuple[str, ...]:
        """The tests; those with the file's name come first."""
        stem = Path(mutant.file).stem
        return tuple(sorted(self.tests, key=lambda test: stem not in test))


GROUPS = (
    Group(
        "policy",
        ("kbpf/policy",),
        _values(
            "policy/store policy/weights policy/slots policy/frontends policy/endpoints"
            " policy/admission serve/health policy/compute policy/any_order"
        ),
        90,
    ),
    Group("bpf-plan", ("kbpf/dataplane/bpf/state/plan.py",), _values("dataplane/plan dataplane/ids"), 90),
    Group(
        "ipvs-plan",
        ("kbpf/dataplane/ipvs/plan.py", "kbpf/dataplane/ipvs/diff.py"),
        (*_values("dataplane/ipvs_plan"), "tests/programs/ipvs/test_ipvs_plane.py"),
        90,
    ),
    Group("decode", ("kbpf/source/decode/decode.py",), _values("source/decode/ policy/weights"), 90),
    Group(
        "reflector",
        ("kbpf/source/api/reflector.py", "kbpf/source/api/watch.py"),
        _values("source/watch source/reflector/"),
        90,
    ),
    Group(
        "config",
        ("kbpf/config",),
        (
            *_values(
                "config/bounded_yaml config/kube_proxy_file config/own_file config/precedence"
                " config/written_file cli/flags cli/commands config/watcher"
                " policy/admission config/bad_inputs serve/metrics"
            ),
            "tests/host/test_output.py",
        ),
        80,
    ),
)


class Equivalent(NamedTuple):
    """A mutant that behaves as the original does; `line` is the line of the source it begins in."""

    file: str
    line: str
    old: str
    new: str
    reason: str


AT_A_TIME = "how much is done at a time; the result is the same"
EQUIVALENT = (
    Equivalent("kbpf/policy/compute.py", "STEP_BUDGET: Final = 512", "512", "513", AT_A_TIME),
    Equivalent("kbpf/policy/compute.py", "PORT_COST: Final = 8", "8", "9", AT_A_TIME),
    Equivalent(
        "kbpf/dataplane/bpf/state/plan.py",
        "in_set_members: bool = False",
        "False",
        "True",
        "it is read only for sets with an id, which always pass it",
    ),
    Equivalent(
        "kbpf/dataplane/bpf/state/plan.py",
        "MAX_FINGERPRINTS: Final = 16_384",
        "16_384",
        "16385",
        "the size of a cache; the rest is computed again",
    ),
    Equivalent(
        "kbpf/policy/compute.py",
        "if is_restricted and ranges is None:",
        "is_restricted and ranges is None",
        "(is_restricted or ranges is None)",
        "they are computed more often, and used only where `is_restricted`",
    ),
    Equivalent(
        "kbpf/source/decode/decode.py",
        "LARGE_OBJECT_BYTES: Final = 256 << 10",
        "256",
        "257",
        "above this size objects are decoded one by one; the result is the same",
    ),
    Equivalent(
        "kbpf/source/decode/decode.py",
        "with _LARGE_OBJECT_LOCK if size > LARGE_OBJECT_BYTES else nullcontext():",
        "size > LARGE_OBJECT_BYTES",
        "(size >= LARGE_OBJECT_BYTES)",
        "the same",
    ),
)


def equivalent(mutant: PythonMutant) -> Equivalent | None:
    """The row of this mutant, if there is one."""
    for row in EQUIVALENT:
        if (row.file, row.old, row.new) == (mutant.file, mutant.old, mutant.new):
            text = (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1]
            if text.strip() == row.line:
                return row
    return None

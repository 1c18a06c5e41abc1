# SPDX-License-Identifier: Apache-2.0
"""Exit codes, the locations that commands read from a file, and imports: what needs no kernel."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kbpf import __version__
from kbpf.checks import bpf as bpf_checks
from kbpf.checks import ipvs as ipvs_checks
from kbpf.checks import neighbours
from kbpf.checks import packet_path as packet_path_checks
from kbpf.checks.row import Check, CheckRow
from kbpf.cli import app, removal
from kbpf.config import locations
from kbpf.dataplane import reader as dataplane
from kbpf.errors import ConfigError, NotFoundError
from kbpf.model.config import Config
from tests.support.table import each_named_pair, each_pair

# ---- exit codes --------------------------------------------------------------------------------


@each_pair(
    "line, end",
    """\
--help → 0 inspect
--version → 0 VERSION
run --help → 0 --nodeport-addresses
inspect --help → 0 affinity
demo --help → 0 --requests
nonsense → 2 nonsense
inspect nonsense → 2 nonsense
inspect services -o xml → 2 xml
monitor --verdict xml → 2 Invalid value for '--verdict': 'xml' is not one of
top --by xml → 2 Invalid value for '--by': 'xml' is not one of 'services'
inspect services --watch -o json → 2 --watch
inspect service → 2 NAME
inspect service shop/web -n edge → 2 Invalid value for --namespace: edge contradicts the namespace of shop/web
inspect service shop/web -n shop --pin-dir /nowhere → 1 /nowhere
inspect connections --help → 0 socket hooks
inspect connections --pin-dir /nowhere → 1 /nowhere
inspect nat --pin-dir /nowhere → 1 /nowhere
inspect sources --pin-dir /nowhere → 1 /nowhere
inspect devices --pin-dir /nowhere → 1 /nowhere
inspect affinity --pin-dir /nowhere → 1 /nowhere
run --mode iptables → 2 iptables
run --nonsense → 2 --nonsense
run extra → 2 extra
demo --requests 0 → 2 --requests
demo --once --cgroup /nowhere → 1 --once has no effect
run --source /nowhere --pin-dir /proc/no → 1 kbpf no such folder of objects (/nowhere)
run --source /etc/hostname --pin-dir /proc/no → 1 a file, not a folder of objects (/etc/hostname)
diff /nowhere → 2 WORLD
diff /nowhere tests/scenarios/shop → 2 no such folder of objects (/nowhere)
diff /etc/hostname tests/scenarios/shop → 2 a file, not a folder
diff tests/scenarios/shop tests/scenarios/shop → 0
diff tests/scenarios/shop tests/scenarios/shop --node x → 2 the Node x does not exist; there are node-1, node-2
simulate /nowhere → 1 no such folder of objects (/nowhere)
simulate tests/scenarios/shop --service shop/carts → 1 is shop/cart meant?
simulate tests/scenarios/shop --service shop/cart → 0 10.244.1.3:8080
simulate tests/scenarios/shop --node x → 1 the Node x does not exist
sysdump /etc/hostname → 1 File exists
sysdump /nowhere/file → 1 No such file or directory
sysdump --time-limit soon → 2 --time-limit
run --config /nowhere → 1 cannot read the configuration
run --mode x --pin-dir y → 2 (--pin-dir)
run --masquerade-all --v=4 -v 2 --proxy-mode x → 2 (--proxy-mode)
run --masquerade-all=maybe → 2 maybe
run --version → 0 VERSION
run --cleanup → 2 kbpf cleanup
inspect services --pin-dir /nowhere → 1 /nowhere
inspect status --pin-dir /nowhere → 1 kbpf run
inspect connections --client here → 2 --client
inspect connections --backend 10.0.0 → 2 --backend
inspect connections --state open → 2 --state
inspect connections --limit -1 → 2 --limit
check --attached --pin-dir /nowhere → 1 /nowhere
""",
)
def test_exit_code_and_output(line, end, capsys):
    """Arguments → the exit code, and words of the output or, if the code is not 0, of the error."""
    code, _, words = end.replace("VERSION", __version__).partition(" ")
    assert app.call(line.split()) == int(code)
    out, err = capsys.readouterr()
    assert words in (err if int(code) else out)
    assert bool(err) == bool(int(code))


def test_no_command_prints_the_help_and_returns_2(capsys):
    assert app.call([]) == 2
    assert "compile" in "".join(capsys.readouterr())


def raises(error: BaseException) -> Any:
    def command(*_: object) -> int:
        raise error

    return command


def test_error_of_kbpf_is_one_line_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(app, "_dispatch", raises(NotFoundError("no cow", "on\nice", "look")))
    assert app.call([]) == 1
    assert capsys.readouterr().err == "kbpf: no cow (on ice); look\n"


def test_interrupt_is_exit_code_130(monkeypatch):
    monkeypatch.setattr(app, "_dispatch", raises(KeyboardInterrupt()))
    assert app.call([]) == 130


FILE = """\
apiVersion: kbpf.io/v1alpha1
kind: KbpfConfiguration
pinDir: /sys/fs/bpf/file
ipvs: {stateDir: /run/file}
"""
PROXYS = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def written(text: str) -> str:
    """A file from lines separated by ` / `. FILE and PROXYS stand for the documents above, EMPTY for nothing;
    FILE OLD>NEW: with this replaced.
    """
    parts = []
    for line in text.split(" / "):
        name, _, change = line.partition(" ")
        old, _, new = change.partition(">")
        document = {"FILE": FILE, "PROXYS": PROXYS, "EMPTY": ""}.get(name)
        parts.append(f"{line}\n" if document is None else document.replace(old, new) if old else document)
    return "".join(parts)


@each_named_pair(
    "given, wanted",
    """\
the file's locations: → /sys/fs/bpf/file /run/file
a flag beats the file: --pin-dir=/sys/fs/bpf/flag → /sys/fs/bpf/flag /run/file
a variable beats the file: KBPF_STATE_DIR=/run/variable → /sys/fs/bpf/file /run/variable
a flag with the default value beats the file: --state-dir=/run/kbpf → /sys/fs/bpf/file /run/kbpf
""",
)
def test_cleanup_uses_the_locations_of_the_file(given, wanted, tmp_path, monkeypatch):
    words = given.split()
    for word in words:
        if word.startswith("KBPF_"):
            monkeypatch.setenv(*word.split("="))
    flags = [word for word in words if word.startswith("--")]
    assert cleaned(monkeypatch, tmp_path, FILE, *flags) == (0, tuple(wanted.split()))


def cleaned(monkeypatch, tmp_path, text: str, *given: str) -> tuple[int, tuple[str, ...]]:
    """Runs `kbpf cleanup` with this file; returns its exit code and the locations it cleans."""
    looked: list[object] = []
    monkeypatch.setattr(removal, "remove_pins", lambda pins, *_: looked.append(pins) or ())

    def remove_ipvs(config: Config, _: bool) -> tuple[()]:
        looked.append(config.state_dir)
        return ()

    monkeypatch.setattr(removal, "remove_ipvs", remove_ipvs)
    (tmp_path / "config.conf").write_text(text)
    code = app.call(["cleanup", "--config", str(tmp_path / "config.conf"), *given])
    return code, tuple(map(str, looked))


LOCATIONS = ("/sys/fs/bpf/file", "/run/file")
ALL = "pin_dir cgroup cache_dir state_dir"


@each_named_pair(
    "mistake, expected",
    """\
no mistake: FILE → |
a value of kube-proxy's document: FILE / --- / PROXYS / mode: best → 'best' |
a value in each document: FILE / algorithm: x / --- / PROXYS / oomScoreAdj: a → KubeProxyConfiguration.oomScoreAdj |
a value of kbpf's document: FILE / algorithm: best → KbpfConfiguration.algorithm |
an unknown field of kbpf's document: FILE / colour: red → KbpfConfiguration.colour |
the version of kube-proxy's document: FILE / --- / PROXYS v1alpha1>v9 → /v9 |
kube-proxy's document twice: FILE / --- / PROXYS / --- / PROXYS → occurs twice |
contradicting values: FILE / socketLB: {mode: off} / packetPath: {enabled: false} → |
a location's value: FILE / pinDir: not/absolute → not/absolute | pin_dir
a location's type: FILE / cgroup: 5 → got an integer | cgroup
a location's spelling: FILE pinDir>pinDirs → is pinDir meant | pin_dir
a location twice, one of them misspelt: FILE / pinDirs: /x → is pinDir meant |
the spelling of the section ipvs: FILE ipvs>ipv → is ipvs meant | state_dir
the spelling of a location in the section ipvs: FILE stateDir>stateDirs → is stateDir meant | state_dir
the type of the section ipvs: FILE ipvs: {>ipvs: [5] # → expected an object | state_dir
the version of kbpf's document: FILE v1alpha1>v9 / --- / PROXYS → /v9 | ALL
kbpf's document twice: FILE / --- / FILE → occurs twice | ALL
a document of another kind: FILE / --- / kind: Pod → 'Pod' |
an unknown kind in place of kbpf's document: FILE KbpfC>C → 'Configuration' | ALL
YAML: FILE / --- / a: b: c → not YAML | ALL
an empty file: EMPTY → the file is empty | ALL
""",
)
def test_locations_are_read_despite_other_mistakes(
    mistake,
    expected,
    tmp_path,
    monkeypatch,
    capsys,
):
    """A file → words of its error | the locations that cannot be read because of it. And `kbpf cleanup` needs only
    them.
    """
    told, names = (part.strip().replace("ALL", ALL) for part in expected.split("|"))
    text = written(mistake)
    parsed = locations.parse_locations(text.encode(), "FILE")
    assert told in "; ".join(map(str, parsed.errors))
    assert bool(parsed.errors) == bool(told)
    assert parsed.unreadable.keys() == set(names.split())
    if names != ALL:
        usual = dict(zip(("pin_dir", "state_dir"), LOCATIONS, strict=True))
        assert {name: str(value) for name, value in parsed.values.items()} == {
            name: value for name, value in usual.items() if name not in names.split()
        }
    is_cleaned = not {"pin_dir", "state_dir"} & {*names.split()}
    assert cleaned(monkeypatch, tmp_path, text) == ((0, LOCATIONS) if is_cleaned else (1, ()))
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == bool(told)


def test_cleanup_does_not_need_a_location_of_the_file_that_is_set_otherwise(tmp_path, monkeypatch):
    text = f"{FILE}pinDir: not/absolute\n"
    assert cleaned(monkeypatch, tmp_path, text, "--pin-dir=/a") == (0, ("/a", *LOCATIONS[1:]))
    monkeypatch.setenv("KBPF_PIN_DIR", "/b")
    assert cleaned(monkeypatch, tmp_path, text) == (0, ("/b", *LOCATIONS[1:]))


@each_pair(
    "text, packet_path",
    """\
no setting: FILE → yes
switched on: FILE / packetPath: {enabled: true} → yes
switched off: FILE / packetPath: {enabled: false} → no
switched off, and a mistake: FILE / packetPath: {enabled: false} / colour: red → no
not YAML: FILE / packetPath: {enabled: false} / --- / a: b: c → yes
no file: → yes
""",
)
def test_check_looks_at_devices_for_another_kbpf_only_with_a_packet_path(text, packet_path, tmp_path, monkeypatch):
    row = CheckRow(Check.KUBE_PROXY, "yes", "")
    for module in (bpf_checks, ipvs_checks):
        monkeypatch.setattr(module, "rows", lambda *_: ())
    monkeypatch.setattr(packet_path_checks, "check_packet_path", lambda _: ())
    monkeypatch.setattr(neighbours, "kube_proxy_row", lambda: row)
    calls: list[object] = []
    monkeypatch.setattr(neighbours, "refusal_rows", lambda *given: calls.append(given[2]) or ())
    file, text = tmp_path / "config.conf", text.partition(": ")[2]
    file.write_text(written(text))
    app.call(["check", *(["--config", str(file)] if text else [])])
    assert calls == [packet_path == "yes"]


def looked_for(monkeypatch, *command: str) -> tuple[str, str]:
    """The pin directory and the state directory of mode ipvs that `kbpf inspect` reads."""
    looked: list[dataplane.Locations] = []

    def look(where: dataplane.Locations, *_: object) -> None:
        looked.append(where)
        raise ConfigError("seen")

    monkeypatch.setattr(dataplane, "read", look)
    assert app.call(command) == 1
    return str(looked[0].pin_dir), str(looked[0].state_dir)


@pytest.mark.parametrize("by_variable", [True, False])
@each_pair(
    "command, wanted",
    """\
inspect services → /sys/fs/bpf/file /run/file/kbpf-ipvs0
inspect status → /sys/fs/bpf/file /run/file/kbpf-ipvs0
inspect maps → /sys/fs/bpf/file /run/file/kbpf-ipvs0
inspect connections --state-dir /flag → /sys/fs/bpf/file /flag/kbpf-ipvs0
inspect nat --pin-dir /flag → /flag /run/file/kbpf-ipvs0
inspect devices --no-headers → /sys/fs/bpf/file /run/file/kbpf-ipvs0
""",
)
def test_inspect_uses_the_locations_of_the_file_unless_overridden(
    command,
    wanted,
    by_variable,
    tmp_path,
    monkeypatch,
    capsys,
):
    file = tmp_path / "config.conf"
    file.write_text(FILE)
    given = () if by_variable else ("--config", str(file))
    if by_variable:
        monkeypatch.setenv("KBPF_CONFIG", str(file))
    pins, ipvs = wanted.split()
    assert looked_for(monkeypatch, *command.split(), *given) == (pins, ipvs)
    assert capsys.readouterr().err == "kbpf: seen\n"
    monkeypatch.setenv("KBPF_PIN_DIR", "/variable")
    flagged = pins if pins == "/flag" else "/variable"
    assert looked_for(monkeypatch, *command.split(), *given)[0] == flagged


@each_pair(
    "given, expected",
    """\
valid: FILE → 0 0
empty: EMPTY → 1 1 the file is empty
two errors: FILE / mode: x / algorithm: z → 1 2 unknown value 'x' (KbpfConfiguration.mode)
a warning: FILE / packetPath: {devices: [a], excludeDevices: [a]} → 0 1 kbpf: warning:
an error and a warning: FILE / mode: x / mode: y → 1 2 warning: line
not YAML: a: b: c → 1 1 not YAML
a folder of another machine: FILE / cgroup: /nowhere → 0 0
a folder of this machine, with --node: FILE / cgroup: /nowhere → 1 1 no such cgroup v2 folder: /nowhere
no file: → 1 1 cannot read the configuration
""",
)
def test_config_validate(given, expected, tmp_path, monkeypatch, capsys):
    """A file → the exit code, and the number of lines on stderr with words of them."""
    rule, _, text = given.partition(": ")
    code, lines, *words = expected.split(" ", 2)
    monkeypatch.setenv("KBPF_MODE", "nonsense")
    file = tmp_path / "config.conf"
    if text:
        file.write_text(written(text))
    assert app.call(["config", "validate", str(file), *(["--node"] if "--node" in rule else [])]) == int(code)
    out, err = capsys.readouterr()
    assert out == (f"{file} is valid\n" if code == "0" else "")
    assert "".join(words) in err
    assert err.count("\n") == int(lines)


@each_pair(
    "text, expected",
    """\
FILE / algorithm: best → /sys/fs/bpf/file /run/file/kbpf-ipvs0 algorithm
FILE / pinDir: no/where → /sys/fs/bpf/kbpf /run/file/kbpf-ipvs0 no/where
a: b: c → /sys/fs/bpf/kbpf /run/kbpf/kbpf-ipvs0 not YAML
 → /sys/fs/bpf/kbpf /run/kbpf/kbpf-ipvs0 cannot read
""",
)
def test_inspect_warns_of_a_bad_file_and_continues(text, expected, tmp_path, monkeypatch, capsys):
    """A file → the locations that are read, and words of the warning."""
    pins, ipvs, told = expected.split(" ", 2)
    file = tmp_path / "config.conf"
    if text:
        file.write_text(written(text))
    monkeypatch.setenv("KBPF_CONFIG", str(file))
    assert looked_for(monkeypatch, "inspect", "status") == (pins, ipvs)
    warning, seen = capsys.readouterr().err.splitlines()
    assert told in warning
    assert str(file) in warning
    assert seen.endswith("seen")


def test_check_uses_the_locations_of_the_file(tmp_path, monkeypatch):
    looked: list[tuple[object, ...]] = []

    def look(*where: object) -> None:
        looked.append(where)
        raise ConfigError("seen")

    monkeypatch.setattr(bpf_checks, "rows", look)
    file = tmp_path / "config.conf"
    file.write_text(f"{FILE}cgroup: /cg\ncacheDir: /cache\n")
    monkeypatch.setenv("KBPF_CONFIG", str(file))
    assert app.call(["check"]) == 1
    assert app.call(["check", "--cgroup", "/flag"]) == 1
    pins = Path("/sys/fs/bpf/file")
    assert looked == [(Path(cgroup), pins, Path("/cache")) for cgroup in ("/cg", "/flag")]


# ---- imports -----------------------------------------------------------------------------------

HEAVY = ("bcc", "pyroute2", "kubernetes", "rich")


def imported(*argv: str) -> set[str]:
    """The top-level modules that are imported after a command."""
    script = (
        "import sys, contextlib, io, json\n"
        "from kbpf.cli import app\n"
        "out, err = io.StringIO(), io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "    app.call(sys.argv[1:])\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_agent_does_not_import_the_command_line():
    # The agent exits because the source is missing, after it has imported all modules.
    modules = imported("run", "--source", "/nowhere", "--pin-dir", "/proc/nowhere")
    assert "msgspec" in modules
    assert not modules & {"typer", "pydantic", *HEAVY}


def test_policy_needs_no_kernel():
    script = (
        "import sys\n"
        f"for name in {('kbpf.kernel.bpf', 'kbpf.kernel.net', 'kbpf.dataplane.bpf', *HEAVY)!r}:\n"
        "    sys.modules[name] = None\n"
        "from kbpf.cli import app\n"
        "sys.exit(app.call(sys.argv[1:]))\n"
    )
    command = ["simulate", "tests/scenarios/shop"]
    subprocess.run([sys.executable, "-c", script, *command], check=True)


def test_inspect_services_imports_no_heavy_module():
    modules = imported("inspect", "services", "-o", "json", "--pin-dir", "/nowhere")
    assert "typer" in modules
    assert not modules & set(HEAVY)

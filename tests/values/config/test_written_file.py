# SPDX-License-Identifier: Apache-2.0
"""The configuration file that is written, durations, and docs/configuration.md."""

import re
import time
from pathlib import Path

import pytest

from kbpf.config import durations, kinds, load, write
from kbpf.config.documents import KBPF_SETTINGS
from kbpf.config.kubeproxy import FIELD_TYPES
from kbpf.config.settings import SETTINGS, SETTINGS_BY_FLAG
from kbpf.errors import ConfigError
from kbpf.model.config import Config, Conntrack, LocalMode, MapSizes, Serving
from tests.support.table import each_pair
from tests.values.config.documents import OWN, cidr, complaints, field, loaded, told

ROOT = Path(__file__).parents[3]


# ---- writing -------------------------------------------------------------------------------------

WRITTEN = [
    Config(),
    Config(node_port_addresses=(cidr("10.0.0.0", 104),), primary_node_ports=True, localhost_node_ports=False),
    Config(
        proxy_mode="nftables",
        masquerade_bit=3,
        masquerade_all=True,
        conntrack=Conntrack(0, 7, 60, 0, True, 30, 5400),
        serving=Serving("[::]:1", "127.0.0.1:2,192.0.2.1:3", True, 90.0, 5),
        sizes=MapSizes(1, 3, connections=6000, affinity=7),
    ),
]
"""Several fields at once; each flag is written by test_every_flag_is_written_and_read_again."""


@pytest.mark.parametrize("config", WRITTEN, ids=range(len(WRITTEN)))
def test_written_configuration_is_read_as_the_same(config: Config):
    assert_written(config)


def assert_written(config: Config) -> None:
    made = loaded(write.format_documents(config))
    mode = config.detect_local_mode or LocalMode.CLUSTER_CIDR
    assert made.config == load.replace(config, detect_local_mode=mode)
    assert "unknown field" not in told(made)


SAMPLES = """\
BOOLEAN: true false
SECONDS: 0s 90s 1.5s 1h0m1s
WHOLE_SECONDS: 0s 90s 25h
PERIOD: 90s 0.25s
DOUBLED_PERIOD: 90s 0.5s
COUNT: 0 7
ENTRIES: 6000
CONNECTIONS: 6000
OOM_SCORE: -5
BIT: 3
PORTS: 5-6
NETWORKS: 10.0.0.0/8,fd00::/48
CLUSTER_CIDRS: 10.0.0.0/8,fd00::/48
EXTERNAL_IPS: all off 10.0.0.0/8,fd00::/48
NODE_PORTS: primary primary,10.0.0.0/8 all
BIND_ADDRESS: 192.0.2.1 fd00::1
HEALTHZ: [::1]:7
METRICS: 127.0.0.1:7,192.0.2.1:7
NAMES: a,b*
CGROUPS: a/b,c*
FILE: /a/b
DIR: /a/b
ABSOLUTE_DIR: /a/b
URL: https://192.0.2.1:6443
NODE_NAME: n-1
DEVICE: cni0
DEVICE_PREFIX: cni0
MODE: auto bpf ipvs
PROXY_MODE: iptables nftables ipvs
KUBERNETES_VERSION: 1.37 1.38
SCHEDULER: wlc
FORWARDING: stack direct
LOG_FORMAT: text json
VERBOSITY: 2 4
ALGORITHM: random maglev
ACCOUNTING: off connections full
SOCKET_LB: off hostNamespaceOnly on
LOCAL_MODE: ClusterCIDR NodeCIDR
FEATURE_GATES: AllowServiceExternalIPs=false
"""
"""A kind of flags: texts that such flags accept. A new kind needs a line here."""
TEXTS = {getattr(kinds, name): texts.split() for name, texts in (line.split(": ") for line in SAMPLES.splitlines())}


GIVEN_WITH = {
    "--pod-bridge-interface": {"--detect-local-mode": "BridgeInterface"},
    "--pod-interface-name-prefix": {"--detect-local-mode": "InterfaceNamePrefix"},
    "--min-sync-period": {"--sync-period": "2h"},
    "--iptables-min-sync-period": {"--iptables-sync-period": "2h"},
    "--ipvs-min-sync-period": {"--ipvs-sync-period": "2h"},
}
"""Flag → other flags without which it is refused, or has no effect."""


GIVEN = [(row.name, text) for row in SETTINGS if row.field for text in TEXTS[row.kind]]


@pytest.mark.parametrize(("flag", "text"), GIVEN, ids=map("=".join, GIVEN))
def test_every_flag_is_written_and_read_again(flag, text):
    assert_written(load.load({flag: text, **GIVEN_WITH.get(flag, {})}, {}).config)


def test_configuration_is_written_atomically(tmp_path):
    target = tmp_path / "config.yaml"
    write.write(Config(), target)
    assert loaded(target.read_text()).config.pin_dir == Config().pin_dir
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    with pytest.raises(ConfigError, match="cannot write the configuration"):
        write.write(Config(), tmp_path / "no" / "config.yaml")


# ---- durations -----------------------------------------------------------------------------------


@each_pair(
    "text, meaning",
    """\
0 → 0.0 0s
0s → 0.0 0s
1s → 1.0 1s
1h0m0s → 3600.0 1h0m0s
90s → 90.0 1m30s
1.5s → 1.5 1.5s
250ms → 0.25 0.25s
24h → 86400.0 24h0m0s
-1s → -1.0 -
+2m → 120.0 2m0s
1h1ms → 3600.001 1h0m0.001s
.5s → 0.5 0.5s
5us → 5e-06 -
5µs → 5e-06 -
""",
)
def test_durations_are_parsed_as_in_go(text, meaning):
    """A text → its seconds, and how they are written."""
    seconds, again = meaning.split()
    assert durations.parse(text, "") == pytest.approx(float(seconds))
    assert again in (durations.format_duration(float(seconds)), "-")


@pytest.mark.parametrize("text", ["", "5", "s", "1d", "1 s", "1s x", "--1s", "1h-1m", ".", "2562048h", "9" * 30 + "s"])
def test_durations_that_go_refuses_are_errors(text):
    with pytest.raises(ConfigError, match=r"not a time.*\(here\)"):
        durations.parse(text, "here")


def test_duration_of_a_million_digits_is_refused_at_once():
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        durations.parse("9" * 1_000_000, "here")
    assert time.process_time() - began < 1
    assert len(str(caught.value)) < 200


# ---- docs/configuration.md -----------------------------------------------------------------------


def pairs(heading: str) -> dict[str, list[str]]:
    """The table below this heading: its first column without backquotes → the other columns."""
    text = (ROOT / "docs/configuration.md").read_text()
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert section is not None
    rows = [line.strip("|").split("|") for line in section[1].splitlines() if line.startswith("|")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def kube_proxys_fields() -> list[str]:
    """Of the table, and of the sentence below it about those that are not used."""
    text = (ROOT / "docs/configuration.md").read_text()
    unused = text.partition("\nNot used: ")[2].partition("\n\n")[0]
    return [*pairs("KubeProxyConfiguration"), *re.findall("`(.*?)`", unused)]


def test_example_of_the_page_loads_and_its_error_is_the_actual_one():
    page = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.S)
    assert example is not None
    made = loaded(example[1])
    assert made.notes == ()
    assert made.config.devices == ("eth0",)
    assert made.config.sizes.connections == 262_144
    (line,) = complaints(OWN + "packetPath: {masqueradePorts: 9-8}")
    assert f"kbpf run: {line}" in page.replace("\n", " ")


def test_page_has_every_field_of_kube_proxys_document():
    assert sorted(kube_proxys_fields()) == sorted(FIELD_TYPES)
    used = {path for setting in SETTINGS if setting.field for path in setting.kube_proxy.split()}
    assert used <= set(pairs("KubeProxyConfiguration"))


def test_page_has_every_field_of_kbpfs_document_with_its_flag():
    rows = pairs("KbpfConfiguration")
    assert list(rows) == list(KBPF_SETTINGS)
    for path, cells in rows.items():
        assert cells[0].strip("`") == KBPF_SETTINGS[path].name


def test_page_has_every_flag_of_kube_proxy_with_its_field_and_aliases():
    """The table of kbpf's document has the others."""
    rows = pairs("Flags")
    assert list(rows) == [s.name for s in SETTINGS if s.field and not s.kbpf]
    for name, (path, others) in rows.items():
        setting = SETTINGS_BY_FLAG[name]
        assert path.strip("`") in setting.kube_proxy.split(), name
        assert tuple(re.findall("`(.*?)`", others)) == setting.aliases, name


def test_page_names_the_flags_that_have_no_effect():
    """Never, or, with a few exceptions, if the file has kube-proxy's document."""
    page = (ROOT / "docs/configuration.md").read_text()
    unused = [setting.name for setting in SETTINGS if not setting.field]
    assert re.findall("`(--.*?)`", page.partition("Accepted without any effect:")[2]) == unused
    kube_proxys = [setting for setting in SETTINGS if setting.field and not setting.kbpf]
    kept = [s.name for s in kube_proxys if not s.is_ignored_with_kube_proxy_document]
    assert kept == ["--hostname-override", "-v", "--log-format"]
    for setting in SETTINGS:
        if setting.kbpf and (setting.aliases or setting.is_ignored_with_kube_proxy_document):
            assert setting.name == "--localhost-nodeports"


def test_every_path_of_a_setting_is_a_field_of_kube_proxys_document():
    paths = {path for setting in SETTINGS for path in setting.kube_proxy.split()}
    assert paths <= set(kube_proxys_fields())


def test_default_in_the_help_is_the_actual_one():
    shown = {
        setting: match[1]
        for setting in SETTINGS
        if (match := re.search(r"\(default ([^:,)]+)[:,)]", setting.help))
        and setting.field != "node_ports"  # depends on --proxy-mode
    }
    assert len(shown) > 40
    for setting, text in shown.items():
        assert setting.kind.parse(text, "") == field(Config(), setting.field), setting.name


def test_defaults_on_the_page_are_the_actual_ones():
    made = write.kbpf_fields(Config())
    for path, (_, default, _) in pairs("KbpfConfiguration").items():
        head, _, tail = path.partition(".")
        value = made.get(head, {}).get(tail, "") if tail else made.get(head, "")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert default.strip("`") == text, path

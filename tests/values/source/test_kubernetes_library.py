# SPDX-License-Identifier: Apache-2.0
"""Why kbpf reads kubeconfigs itself: what the kubernetes library does with them, next to what kbpf
does. A library that passes where it failed makes a test fail here; then kubeconfig.py can use it
for that (docs/decisions.md, "A kubeconfig is read by our own code").
"""

import os
import stat
from pathlib import Path

import pytest
from kubernetes.client import Configuration
from kubernetes.config import kube_config
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

from kbpf.errors import ConfigError
from kbpf.source.api.kubeconfig import find_access
from tests.values.source.transport.kubeconfigs import URL, b64, exec_user, write


def load(path: Path) -> Configuration:
    """Reads a kubeconfig with the library, as its load_kube_config() does."""
    config = Configuration()
    loader = KubeConfigLoader(KubeConfigMerger(str(path)).config, config_base_path=None)
    loader.load_and_set(config)
    return config


def test_library_reads_a_token_file_once_with_its_newline(tmp_path: Path):
    (tmp_path / "token").write_text("one\n")
    path = write(tmp_path / "kc", user={"tokenFile": "token"})
    config = load(path)
    (tmp_path / "token").write_text("two\n")
    assert config.get_api_key_with_prefix("BearerToken") == "Bearer one\n"
    assert find_access(path).token_file == str(tmp_path / "token"), "kbpf reads it per request"


SILENT = [
    ("a missing user means anonymous", "users: [{name: u", "users: [{name: v", "no user 'u'"),
    ("a missing server is no error", f"server: {URL}", "x: y", "not the URL"),
    ("impersonation is ignored", "user: {}", "user: {as: someone}", "sets as, which is not"),
    (
        "data that is not base64 is used",
        f"server: {URL}",
        f"server: {URL}, certificate-authority-data: '%'",
        "is not base64",
    ),
]
TEXT = f"""current-context: here
contexts: [{{name: here, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: {URL}}}}}]
users: [{{name: u, user: {{}}}}]
"""


@pytest.mark.parametrize(("name", "old", "new", "error"), SILENT, ids=[row[0] for row in SILENT])
def test_library_accepts_what_kbpf_refuses(tmp_path: Path, name: str, old: str, new: str, error: str):
    path = tmp_path / "kc"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new))
    config = load(path)
    assert config.get_api_key_with_prefix("BearerToken") is None
    assert config.host == ("" if "server" in name else URL)
    with pytest.raises(ConfigError, match=error):
        find_access(path)


def test_library_fails_without_a_reason_on_a_wrong_type(tmp_path: Path):
    path = tmp_path / "kc"
    path.write_text(TEXT.replace(URL, "5"))
    with pytest.raises(AttributeError):
        load(path)
    with pytest.raises(ConfigError, match=r"clusters\[0\].cluster.server: expected a string"):
        find_access(path)


def test_library_writes_a_private_key_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kube_config.tempfile, "tempdir", str(tmp_path))
    user = {"client-certificate-data": b64("C"), "client-key-data": b64("K")}
    path = write(tmp_path / "kc", user=user)
    before = {*os.listdir(tmp_path)}
    assert find_access(path).key_data == b"K"
    assert {*os.listdir(tmp_path)} == before, "kbpf keeps it in memory"
    key_file = Path(load(path).key_file)
    assert key_file.parent == tmp_path
    assert (key_file.read_bytes(), stat.S_IMODE(key_file.stat().st_mode)) == (b"K", 0o600)


def test_library_expands_aliases_without_a_limit(tmp_path: Path):
    levels = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    levels += [f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcde", "bcdef", strict=True)]
    path = tmp_path / "kc"
    path.write_text(f"users: [{{name: u, user: {{{', '.join(levels)}}}}}]\n")
    assert path.stat().st_size < 400
    (user,) = KubeConfigMerger(str(path)).config_merged.value["users"]
    assert len(user.name) > 2_000_000
    with pytest.raises(ConfigError, match="more than 100000 nodes"):
        find_access(path)


def test_library_runs_the_plugin_while_it_reads(tmp_path: Path):
    """A plugin that hangs would delay the start, and one that fails would end it."""
    ran = tmp_path / "ran"
    path = write(tmp_path / "kc", user=exec_user(tmp_path, f"touch {ran}\nexit 1"))
    assert find_access(path).plugin == path
    assert not ran.exists()
    load(path)
    assert ran.exists()

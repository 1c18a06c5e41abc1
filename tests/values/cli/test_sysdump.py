# SPDX-License-Identifier: Apache-2.0
"""`kbpf sysdump`: what is removed from texts, and how parts are limited. The archive itself is in
tests/programs/node/commands/test_sysdump.py.
"""

import base64
import io
import json
import os
import socket
import tarfile
import threading
import time
from pathlib import Path

import pytest
import yaml

from kbpf import bounded_yaml
from kbpf.cli import app
from kbpf.cli.dump import collect, objects, parts
from kbpf.cli.dump.collect import Collected, Limit
from kbpf.cli.dump.redact import Redactor, find_secrets
from kbpf.cli.sysdump import Archive
from kbpf.kernel.system import children, pods
from tests.support.cluster import scenario
from tests.support.faults.scripted import ScriptedServer
from tests.support.lab.lab import until
from tests.support.table import each_case, each_named_pair, each_pair, pairs
from tests.values.source.reflector.scripted import listed, status

# ---- secrets -------------------------------------------------------------------------------------

PEM = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIhidden\n-----END EC PRIVATE KEY-----"
PATTERNS = pairs(r"""a URL: --master=https://me:hidden@192.0.2.1:6443/x → --master=https://REDACTED@192.0.2.1
a user in a URL: http://hidden@proxy:3128 → http://REDACTED@proxy:3128
a header: Authorization: Bearer hidden.token → Authorization: Bearer REDACTED
basic: authorization: Basic aGlkZGVu → authorization: Basic REDACTED
a JWT: seen eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJoaWRkZW4i.hidden_-x end → seen REDACTED end
a JWT in a word: x-eyJhbGciOiJSUzI1NiJ9.hidden-11.sig.hidden.hidden end → REDACTED end
YAML: users:\n- user:\n    token: hidden\n →     token: REDACTED\n
quoted: password: 'hidden words' # why → password: 'REDACTED' # why
JSON: {"clientSecret": "hid\"den", "b": 1} → {"clientSecret": "REDACTED", "b": 1}
a flag: run --api-token=hidden -v → run --api-token=REDACTED -v
a variable: KBPF_DB_PASSWORD=hidden → KBPF_DB_PASSWORD=REDACTED
inline data: client-key-data: aGlkZGVu → client-key-data: REDACTED
PEM that a tenant begins in a log: 12:00:01 -----BEGIN PRIVATE KEY-----\n12:00:02 kept → :00:02 kept
another scheme: Authorization: Token hidden\nx: 1 → Authorization: Token REDACTED\nx: 1
digest: Authorization: Digest username="me", response="hidden", n=1\nx → Digest REDACTED\nx
a header in JSON: {"h": {"Authorization": "Token hidden"}, "m": "Authorization: hidden", "n": 1} → "n": 1}
a header in a command: curl -H 'Authorization: ApiKey hidden' -v → REDACTED' -v
a cookie: Cookie: a=hidden; b=hidden\nx → Cookie: REDACTED\nx
a new cookie: set-cookie: sid=hidden; Path=/; Secure → set-cookie: REDACTED
a flag and its value: join --token hidden --v 5 → join --token REDACTED --v 5
a flag in a list: ["--db-password", "hidden", "-v"] → ["--db-password", "REDACTED", "-v"]
a flag in YAML: args:\n- --token\n- hidden\n- -v → - --token\n- REDACTED\n- -v
escaped blanks: --password=a\ hidden -v → --password=REDACTED -v
a comma: password=a,hidden b → password=REDACTED b
a brace: {password: a}hidden, b: 1} → {password: REDACTED, b: 1}
a string in JSON: {"a": "password=hidden", "b": ["token=hidden"]} → ", "b": ["token=REDACTED"]}
pwd: pwd=hidden → pwd=REDACTED
a short name: DB_PASS=hidden → DB_PASS=REDACTED
a secret key: SECRET_KEY=hidden → SECRET_KEY=REDACTED
a secret key in YAML: secretKey: hidden → secretKey: REDACTED
a registry: {"auth": "hidden"} → {"auth": "REDACTED"}
digits: password: 48151623 no → password: REDACTED no
a slash: token: /9jhidden/abc= → token: REDACTED
a slash in JSON: {"secret": "/varhidden/"} → {"secret": "REDACTED"}
an access key by name: AWS_SECRET_ACCESS_KEY=hidden/x → AWS_SECRET_ACCESS_KEY=REDACTED
credentials: registry_credentials: hidden → registry_credentials: REDACTED
""")
"""A rule: a text → a part of what remains; \\n is the end of a line."""
LONG_PATTERNS = {
    "PEM": (f"x\n{PEM}\ny", "x\nREDACTED\ny"),
    "PEM in JSON": (json.dumps({"a": PEM}), '{"a": "REDACTED"}'),
    "PEM that is cut off": (PEM[:50], "REDACTED"),
    "encrypted PEM that is cut off": (
        "-----BEGIN PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,0F\nhidden",
        "REDACTED",
    ),
    "PEM that a tenant begins": (
        '{"a": "-----BEGIN PRIVATE KEY-----", "b": "-----END PRIVATE KEY-----", "c": "kept"}',
        '{"a": "REDACTED", "b": "-----END PRIVATE KEY-----", "c": "kept"}',
    ),
    "a quote that a tenant opens": (
        "web: token: 'hidden\n12:00:02 kept token=\"hidden\n12:00:03 kept",
        'REDACTED\'\n12:00:02 kept token="REDACTED"\n12:00:03 kept',
    ),
}
KEYS = """\
AKIAHIDDENHIDDEN1234
ASIAHIDDENHIDDEN1234
xoxb-12345-hidden-abc
glpat-hiddenhiddenhiddenhidden
ghp_hiddenhiddenhiddenhiddenhiddenhidden
ghs_hiddenhiddenhiddenhiddenhiddenhidden
github_pat_11hiddenhiddenhiddenhiddenhiddenhiddenhiddenhidden
AIzaSy-hiddenhiddenhiddenhiddenhiddenabc
ya29.a0hiddenhiddenhiddenhiddenhidden
dckr_pat_hiddenhiddenhiddenhiddenhidden
hvs.hiddenhiddenhiddenhiddenhidden
sk_live_hiddenhiddenhiddenhiddenhidden
"""
SECRETS = [
    *((text.replace(r"\n", "\n"), part.replace(r"\n", "\n")) for text, part in PATTERNS),
    *((f": {text}", part) for text, part in LONG_PATTERNS.values()),
    *((f": seen {key}.", "seen REDACTED") for key in KEYS.split()),
]


@pytest.mark.parametrize(("row", "part"), SECRETS)
def test_what_looks_like_a_secret_is_removed(row, part):
    text = row.partition(": ")[2]
    result = Redactor([]).redact(text.encode()).decode()
    assert part in result
    assert "hidden" not in result.lower()
    assert "aGlkZGVu" not in result
    assert "48151623" not in result
    if text.startswith('{"'):
        json.loads(result)


KEPT = (
    "tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token",
    "tokenFile: '/var/run/token'",
    "cannot read the token file: No such file or directory",
    'kbpf_services{service="shop/secret-app"} 3',
    '"token": null, "tokens": 5, "password": "", "secret": true',
    "10.96.0.1:80 mail@example.com https://example.com/a@b",
    "the bearer of 3 tokens",
    "token: /var/run/secrets/token\nsecret=/etc/kubernetes/pki/x.key PWD=/root",
    "--token is deprecated, --password and --token-file need root; use --token with --server",
    "--token --verbose",
    "token: 12, secret: 3\ntoken=999",
    "cookie=48151624 netns cookie: 4026531840",
    "authorization:\n  mode: Webhook\n",
    "task-akia glance-image xoxo ghp_short AIza eyJ",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "-----BEGIN PRIVATE KEY----",
)


@pytest.mark.parametrize("text", KEPT, ids=lambda text: text[:60])
def test_what_is_no_secret_is_kept(text):
    assert Redactor([]).redact(text.encode()) == text.encode()


@pytest.mark.parametrize(
    "text",
    [
        "eyJ-",
        "--token ",
        "authorization: ",
        "cookie: a",
        "pwd=,",
        "//a",
        "password='\\",
        "gl-a.",
        "-----BEGIN PRIVATE KEY-----",
        "token: -token",
        "-token\n\n\n",
        "secret\t\t",
        "AKIA-",
    ],
)
def test_many_beginnings_of_secrets_are_each_tried_once(text):
    """Tenants write annotations and logs. One scan to the end for each beginning takes hours, as
    does one for each blank after it.
    """
    for many in (text * 100_000, text + text[-1] * 1_000_000):
        Redactor([]).redact(many.encode())


KUBECONFIG = """\
clusters: [{name: c, cluster: {server: "https://192.0.2.1", certificate-authority-data: cHVibGlj}}]
users:
- name: plain
  user: {token: tok-1-hidden, username: me, password: pass-1-hidden}
- name: certificate
  user: {client-certificate-data: cert-hidden, client-key-data: %s}
- name: file
  user: {tokenFile: %s, client-key: /etc/key.pem}
- name: plugin
  user:
    exec: {apiVersion: v1, command: aws, args: [token, --region=visible, --api-key=arg-hidden],
           env: [{name: AWS_SECRET, value: aws-hidden}, {name: AWS_PROFILE, value: visible}]}
    auth-provider: {name: oidc, config: {client-id: visible, refresh-token: refresh-hidden}}
- broken
"""


def test_known_secrets_are_found_and_removed_in_any_form(tmp_path):
    token_file, kubeconfig = tmp_path / "token", tmp_path / "kubeconfig"
    token_file.write_text("file-hidden\n")
    key = base64.b64encode(b"key-hidden").decode()
    kubeconfig.write_text(KUBECONFIG % (key, token_file))
    environ = {
        "MY_TOKEN": "env-hidden",
        "HTTPS_PROXY": "http://u:proxy-hidden@x",
        "KEEP": "visible",
        "PASSWORD_FILE": "/etc/password",
        "SECRET": "no",
    }
    secrets = list(find_secrets([kubeconfig, tmp_path / "none"], ["https://m:url&hidden@h"], environ))
    names = ("tok-1", "pass-1", "cert", "key", "file", "env", "proxy", "aws", "refresh", "arg")
    values = [*(f"{name}-hidden" for name in names), "url&hidden"]
    redactor = Redactor(secrets)
    for value in values:
        for form in (
            value,
            base64.b64encode(value.encode()).decode(),
            value.replace("&", "%26"),
            json.dumps({"x": f"{value}"}),
        ):
            result = redactor.redact(f"visible {form} v1 aws token".encode()).decode()
            assert value not in result
            assert form not in result
            assert result.startswith("visible ")
            assert result.endswith(" v1 aws token")
    assert redactor.redact(b"no public /etc/key.pem") == b"no public /etc/key.pem"


def test_a_variable_that_is_not_utf8_is_removed():
    environ = {"MY_TOKEN": os.fsdecode(b"hidden\xff"), "MY_URL": os.fsdecode(b"http://u:\xfehidden@h")}
    redactor = Redactor(find_secrets([], [], environ))
    assert redactor.redact(b"a hidden\xff u:\xfehidden b") == b"a REDACTED REDACTED b"


@pytest.mark.parametrize("text", ["", "a: [", "users: 3", "users: [{user: [1, null]}]", "\x00"])
def test_a_kubeconfig_of_another_form_is_no_error(text, tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    assert Redactor(find_secrets([path], [], {})).redact(b"plain") == b"plain"


# ---- objects -------------------------------------------------------------------------------------

WEB, SLICE, NODE = yaml.safe_load_all("""\
apiVersion: v1
kind: Service
metadata: {name: web, creationTimestamp: '2026'}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.1.0.1], nodeName: n1}]
---
{apiVersion: v1, kind: Node, metadata: {name: n1}}
""")
NOTES = {"last-applied": "hidden", "kbpf.io/weights": "*=1"}
READ = {
    "all kinds": ([NODE, WEB, SLICE], [NODE, WEB, SLICE]),
    "fields that kbpf does not read": (
        [WEB | {"metadata": WEB["metadata"] | {"annotations": NOTES, "labels": None}, "x": [1]}],
        [WEB | {"metadata": WEB["metadata"] | {"annotations": {"kbpf.io/weights": "*=1"}}}],
    ),
    "other kinds": ([{"kind": "Secret", "data": {}}, {"kind": "Pod", "metadata": {}}, NODE], [NODE]),
    "a list": ([{"kind": "NodeList", "items": [NODE | {"status": None}]}], [NODE]),
    "a field of another type": ([NODE | {"metadata": "hidden"}, NODE | {"spec": "x"}, WEB], [WEB]),
    "a value that kbpf rejects": ([WEB | {"spec": {"clusterIP": "x"}}],) * 2,
    "text that looks like a number": ([NODE | {"metadata": {"name": "08"}}],) * 2,
}


@each_case("written, read", READ)
def test_objects_have_what_kbpf_reads(written, read, tmp_path, monkeypatch, capsys):
    (tmp_path / "all.yaml").write_text("---\n".join(map(bounded_yaml.dump, written)))
    monkeypatch.setenv("KBPF_SOURCE", str(tmp_path))
    assert objects.main() == 0
    out, err = capsys.readouterr()
    assert [*filter(None, bounded_yaml.load_all(out.encode(), bounded_yaml.MANIFESTS))] == read
    assert err == ""


def test_a_broken_file_loses_only_itself(tmp_path, monkeypatch, capsys):
    for name, text in (("a.yaml", "{"), ("b.json", json.dumps(NODE)), ("c.txt", "{"), ("d.json", "{")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KBPF_SOURCE", str(tmp_path))
    assert objects.main() == 1
    out, err = capsys.readouterr()
    assert "name: n1" in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["not YAML", "not JSON"]


@pytest.mark.parametrize("name", scenario.names())
def test_objects_of_a_folder_are_equivalent(name, tmp_path, monkeypatch, capsys):
    folder = str(scenario.HERE / name)
    monkeypatch.setenv("KBPF_SOURCE", folder)
    assert objects.main() == 0
    (tmp_path / "cluster.yaml").write_text(capsys.readouterr().out)
    assert app.call(["diff", folder, str(tmp_path)]) == 0


def test_objects_of_an_api_server_come_page_by_page(tmp_path, capsys):
    """Also from one that cannot select Services by their ClusterIP."""
    unsupported = status(400, "field label not supported: spec.clusterIP")
    script = (listed(NODE), unsupported, listed(WEB, token="t"), listed(WEB), listed(SLICE))
    path = tmp_path / "kubeconfig"
    with ScriptedServer(*script) as server:
        path.write_text(KUBECONFIG_OF_URL % server.url)
        assert objects.main("--kubeconfig", str(path)) == 0
    out = capsys.readouterr().out.encode()
    kinds = [obj["kind"] for obj in bounded_yaml.load_all(out, bounded_yaml.MANIFESTS) if obj]
    assert kinds == ["Node", "Service", "Service", "EndpointSlice"]
    assert "fieldSelector" in server.requests[1].query
    assert "fieldSelector" not in server.requests[2].query


KUBECONFIG_OF_URL = """\
current-context: c
contexts: [{name: c, context: {cluster: c}}]
clusters: [{name: c, cluster: {server: "%s"}}]
"""


def test_an_api_server_that_is_down_is_one_line(tmp_path, capsys):
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG_OF_URL % "http://127.0.0.1:1")
    assert objects.main("--kubeconfig", str(path)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err


def test_objects_that_are_cut_off_are_whole():
    texts = [f"name: n{i}\nlist:\n- 1\n- 2\n" for i in range(3)]
    data = "---\n".join([*texts, ""]).encode()
    for size in range(len(data) + 1):
        with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as tar:
            Archive(tar, "dump", size, lambda text: text).add("objects/cluster.yaml", data)
        with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as tar:
            kept = [tar.extractfile(member).read().decode() for member in tar]  # type: ignore[union-attr]
        assert "".join(kept).split("---\n") in ([""], texts[:1], texts[:2], [*texts, ""])


# ---- the file ------------------------------------------------------------------------------------


# ---- limits --------------------------------------------------------------------------------------


def limit(max_bytes: int = 1000, seconds: float = 60) -> Limit:
    return Limit(max_bytes, time.monotonic() + seconds)


@each_named_pair(
    "text, expected",
    r"""all is well: echo out → out\n
it fails: echo half; echo noise >&2; echo why >&2; exit 3 → half\n | exit code 3: why
it reports findings: echo found; exit 1 → found\n
it has no output: exit 1 → | exit code 1
it is killed: kill -9 $$ → | exit code -9
it prints too much: yes xxxxxxxxx → xxxxxxxxx\nxxxxxxxxx\n | cut off: more than 1000 bytes
one endless line: cat /dev/zero → | cut off
too much on stderr: head -c 1000000 /dev/zero >&2; echo out → out\n
a file: cat /proc/self/comm → cat\n
no file: cat /none → | exit code 1: cat: /none: No such file
""",
)
def test_a_command_is_limited(text, expected):
    """What a shell does → the beginnings of the data | and of the error."""
    data, _, error = expected.partition("| ")
    collected = collect.run_command(("sh", "-c", text))(limit())
    assert collected.data.startswith(data.strip().replace(r"\n", "\n").encode())
    assert len(collected.data) <= 1000
    assert collected.error.startswith(error)
    assert (bool(collected.data), bool(collected.error)) == (bool(data.strip()), bool(error))


@each_pair(
    "commands, expected",
    """\
kbpf-none → kbpf-none is not installed
/etc/passwd → /etc/passwd is not installed
kbpf-none; echo hi → hi
echo hi; kbpf-none → hi
""",
)
def test_the_first_command_that_is_installed_runs(commands, expected):
    """Commands → what the first prints that is installed, or the error."""
    collected = collect.run_command(*(tuple(command.split()) for command in commands.split("; ")))(limit())
    assert collected.data.decode().rstrip() + collected.error == expected


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path):
    child = tmp_path / "child"
    text = f"sleep 1000 & echo $! >{child}.new; mv {child}.new {child}; wait"

    class UntilItHangs(Limit):
        @property
        def seconds(self) -> float:
            return 0.0 if child.exists() else 0.05

    collected = collect.run_command(("sh", "-c", text))(UntilItHangs(1000, 0.0))
    assert collected.error == "took too long, and was ended"
    until("its child has ended", lambda: not is_running(int(child.read_text())))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_end_of_a_log_is_kept(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1\n")
    two.write_text("line\n" * 1000)
    tail = collect.read_tail(two)(limit(13))
    assert tail == Collected(b"line\nline\n", "only the end of 5000 bytes")
    assert collect.read_tail(one)(limit()) == Collected(b"1\n")
    assert collect.read_tail(tmp_path)(limit()).error == "Is a directory"


OWN_UID, OTHER_UID = "11111111-2222-3333-4444-555555555555", "66666666"
LOGS = {
    f"kube-system_kbpf-x_{OTHER_UID}": True,
    f"kube-system_kube-proxy-abcde_{OTHER_UID}": True,
    f"kube-system_coredns-1_{OTHER_UID}": False,
    f"balancer_kbpf-y_{OTHER_UID}": True,  # the namespace of this command's own Pod
    f"lb_anything_{OWN_UID}": True,
    f"shop_kbpf-z_{OTHER_UID}": False,
    f"kube-system-2_kube-proxy_{OTHER_UID}": False,
    "kbpf": False,
}
"""Folders of /var/log/pods, and whether their logs are those of agents."""


def test_logs_are_those_of_agents_whatever_tenants_call_their_pods(tmp_path, monkeypatch):
    for name in LOGS:
        (tmp_path / name / "kbpf").mkdir(parents=True)
        (tmp_path / name / "kbpf/0.log").write_text("x\n")
    (tmp_path / f"kube-system_kbpf-x_{OTHER_UID}/kbpf/1.log").symlink_to("nowhere")
    (tmp_path / "account").mkdir()
    (tmp_path / "account/namespace").write_text("balancer\n")
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(f"0::/kubepods/besteffort/pod{OWN_UID}/c\n")
    monkeypatch.setattr(pods, "LOG_FOLDER", tmp_path)
    monkeypatch.setattr(parts, "SERVICE_ACCOUNT", tmp_path / "account")
    monkeypatch.setattr(parts, "PROC", tmp_path / "proc")
    found = {path.relative_to(tmp_path).parts[0] for path in parts.find_pod_logs(7)}
    assert found == {name for name, is_agents in LOGS.items() if is_agents}
    monkeypatch.setattr(pods, "LOG_FOLDER", tmp_path / "none")
    assert parts.find_pod_logs(None) == []


def test_sysctls_are_lines_without_secrets(tmp_path):
    for name, text in (
        ("net/ipv4/ip_forward", "1\n"),
        ("net/x/stable_secret", "hidden"),
        ("net/many", "1\n2\n"),
        ("fs/no", "x"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    read = collect.read_sysctls(tmp_path)
    assert read(limit()) == Collected(b"net.ipv4.ip_forward = 1\nnet.many = 1 2\n")
    assert read(limit(30)) == Collected(b"net.ipv4.ip_forward = 1\n", "cut off")


def serve(answer: bytes) -> str:
    """An HTTP server for one request that answers like this."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = server.accept()
        with server, connection:
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=run, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


NOBODY = "http://127.0.0.1:1/x"
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
ANSWERS = {
    "a body": (HEAD + b"ok\n", b"ok\n", ""),
    "an error": (b"HTTP/1.1 503 Not Yet\r\nContent-Length: 2\r\n\r\nno", b"no", "503 Not Yet"),
    "too much": (HEAD + b"line\n" * 1000, b"line\n" * 200, "cut off"),
    "nobody": (b"", b"", "refused"),
    "no HTTP": (b"what?\r\n", b"", "what?"),
}


@each_case("answer, data, error", ANSWERS)
def test_an_answer_is_limited(answer, data, error):
    command = children.python_command(parts.FETCH_MODULE, f"http://{serve(answer)}/metrics" if answer else NOBODY)
    collected = collect.run_command(command)(limit())
    assert collected.data == data
    assert error in collected.error
    assert bool(collected.error) == bool(error)


def test_a_bug_in_one_part_is_its_error():
    def broken(_: Limit) -> Collected:
        raise RuntimeError("on purpose")

    def failing(_: Limit) -> Collected:
        raise OSError(28, os.strerror(28))

    assert "on purpose" in collect.safely(broken, limit()).error
    assert "No space left" in collect.safely(failing, limit()).error

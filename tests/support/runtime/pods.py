# SPDX-License-Identifier: Apache-2.0
"""Runs a Pod's container with runc: makes the OCI configuration that a kubelet and containerd would
make of the Pod's spec, as far as DaemonSets of this project need it.

The container gets exactly what the spec grants: capabilities, no_new_privs, the default seccomp
profile (containers-common's in place of containerd's), an AppArmor profile that is loaded, a
read-only root, mounts, a process namespace, the memory limit. A field that is not known here is an
error, so that nothing is ignored. A capability that the tests themselves lack cannot be granted
(SYS_RESOURCE on some machines); the container then runs without it. A privileged container
(kube-proxy's) gets all capabilities of the tests, no seccomp filter, and a writable /proc/sys.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster.kube import Object
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, inside

SECCOMP = Path("/usr/share/containers/seccomp.json")
OURS = Path(__file__).parents[3] / "manifests" / "security" / "kbpf.json"
"""Our seccomp profile, which kubelet finds in /var/lib/kubelet/seccomp."""
LOADED = Path("/sys/kernel/security/apparmor/profiles")
MACHINES = {"x86_64": ("amd64", "SCMP_ARCH_X86_64"), "aarch64": ("arm64", "SCMP_ARCH_AARCH64")}
MASKED = [
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
CAPABILITIES = {
    **{"NET_ADMIN": 12, "SYS_ADMIN": 21, "SYS_RESOURCE": 24, "PERFMON": 38, "BPF": 39},
    **{"DAC_OVERRIDE": 1, "KILL": 5, "NET_RAW": 13, "SYS_MODULE": 16},
}
"""The numbers of the capabilities that manifests/ request, and of more that a kube-proxy needs."""
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"]


@dataclass(frozen=True, slots=True)
class Image:
    """The container's root: a folder with read-only bind mounts (`shown`); `instead`: mounts that
    replace parts of these. `path`: PATH for commands.
    """

    root: Path
    shown: tuple[Path, ...] = ()
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[Path, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Host:
    """The node: its network namespace and name, the container's name and its cgroup relative to
    each hierarchy's root, the folder of each hostPath on this machine, and folders for volumes of
    other kinds (by the volume's name).
    """

    netns: str
    name: str
    container: str
    cgroup: str
    paths: Mapping[str, Path]
    volumes: Mapping[str, Path]
    service_account: Path | None


def this_machine(folder: Path, *more: Path) -> Image:
    """An image of this machine's /usr and /etc and further folders."""
    for name in ("bin", "sbin", "lib", "lib64"):
        if (link := Path("/") / name).is_symlink():
            (folder / name).symlink_to(os.readlink(link))
    return Image(folder, (Path("/usr"), Path("/etc"), *more))


def oci_config(spec: Object, image: Image, host: Host) -> Object:
    """The OCI runtime's config.json for a Pod's only container."""
    (container,) = spec["containers"]
    assert spec["hostNetwork"], "this fake only runs host-network pods"
    rights = _rights(container["securityContext"])
    env = {"PATH": image.path, **image.env, **_environment(container.get("env", ()), host)}
    namespaces: list[Object] = [{"type": n} for n in ("mount", "pid", "ipc", "uts", "cgroup")]
    limits = container.get("resources", {}).get("limits", {})
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(image.root), "readonly": rights.read_only},
        "process": {
            "user": {"uid": rights.user, "gid": rights.user},
            "cwd": "/",
            "args": [_substituted(word, env) for word in container["command"]],
            "env": [f"{name}={value}" for name, value in env.items()],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights.capabilities),
            "noNewPrivileges": not rights.escalates,
            **_apparmor(container["securityContext"].get("appArmorProfile")),
        },
        "mounts": [
            *_own_mounts("rw" if rights.privileged else "ro"),
            *_volume_mounts(spec, container, host, image),
            # Last: a folder of the image may be below a volume, such as a clone in /tmp.
            *(_mount(str(path), "bind", str(path), "bind", "ro") for path in image.shown),
            *(_mount(str(to), "bind", str(of), "bind", "ro") for to, of in image.instead.items()),
        ],
        "linux": {
            "namespaces": [*namespaces, {"type": "network", "path": f"/run/netns/{host.netns}"}],
            **({} if rights.privileged else {"maskedPaths": MASKED, "readonlyPaths": READ_ONLY}),
            "seccomp": _seccomp(rights.seccomp, rights.capabilities),
            "resources": {"memory": {"limit": _bytes(limits["memory"])}} if limits else {},
            "cgroupsPath": f"/{host.cgroup}",
        },
    }


@dataclass(frozen=True, slots=True)
class _Rights:
    """The grants of a securityContext; `capabilities` have the runtime's names."""

    capabilities: list[str]
    privileged: bool
    escalates: bool
    read_only: bool
    seccomp: Object
    user: int = 0


def _rights(security: Object) -> _Rights:
    if security["privileged"]:
        assert security == {"privileged": True}, security
        granted = [f"CAP_{name}" for name in sorted(capabilities_here(CAPABILITIES))]
        return _Rights(granted, True, True, False, {"type": "Unconfined"})
    wanted = set(security["capabilities"].get("add", ()))
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["runAsUser"] == 0 or not wanted, "capabilities for other users are not supported"
    return _Rights(
        [f"CAP_{name}" for name in sorted(wanted & capabilities_here(wanted))],
        False,
        security["allowPrivilegeEscalation"],
        security["readOnlyRootFilesystem"],
        security["seccompProfile"],
        security["runAsUser"],
    )


def capabilities_here(names: Iterable[str]) -> set[str]:
    """Those of these capabilities that this process has."""
    status = Path("/proc/self/status").read_text()
    (bits,) = re.findall(r"^CapPrm:\s*([0-9a-f]+)$", status, re.M)
    return {name for name in names if int(bits, 16) >> CAPABILITIES[name] & 1}


def _environment(rows: Sequence[Object], host: Host) -> dict[str, str]:
    made = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for row in rows:
        if "valueFrom" in row:
            assert row["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName", row
            made[row["name"]] = host.name
        else:
            made[row["name"]] = row["value"]
    return made


def _substituted(word: str, env: Mapping[str, str]) -> str:
    for name, value in env.items():
        word = word.replace(f"$({name})", value)
    return word


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def _own_mounts(sys: str) -> list[Object]:
    """The mounts of every container; `sys` is "ro" or "rw" for /sys."""
    return [
        _mount("/proc", "proc", "proc"),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755", "size=65536k"),
        *(_mount(device, "bind", device, "bind") for device in DEVICES),
        _mount("/sys", "bind", "/sys", "bind", sys),
    ]


def _volume_mounts(spec: Object, container: Object, host: Host, image: Image) -> list[Object]:
    """The mounts of the container's volumes. A mount point inside a read-only part of this machine
    cannot be created, unlike in an image (/lib/modules on machines without modules): such a mount
    is left out.
    """
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    made = []
    if host.service_account is not None:
        secrets = "/var/run/secrets/kubernetes.io/serviceaccount"
        made.append(_mount(secrets, "bind", str(host.service_account), "bind", "ro"))
    for row in container.get("volumeMounts", ()):
        assert row.keys() <= {"name", "mountPath", "readOnly", "mountPropagation"}, row
        propagation = {"HostToContainer": "rslave", "None": "rprivate"}
        options = ("rbind", propagation[row.get("mountPropagation", "None")], "ro" if row.get("readOnly") else "rw")
        source = _source(volumes[row["name"]], host)
        place = Path(row["mountPath"]).resolve()
        if not place.exists() and any(place.is_relative_to(each) for each in image.shown):
            continue
        made.append(_mount(row["mountPath"], "bind", str(source), *options))
    return made


def _source(volume: Object, host: Host) -> Path:
    """The volume's folder on this machine."""
    given = volume.get("hostPath")
    if given is None:
        return host.volumes[volume["name"]]
    path = host.paths[given["path"]]
    match given["type"]:
        case "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        case "FileOrCreate":
            path.touch()
            return path
    assert path.is_dir(), (given, path)
    return path


def _mount(to: str, kind: str, source: str, *options: str) -> Object:
    return {"destination": to, "type": kind, "source": source, "options": list(options)}


def _apparmor(profile: Object | None) -> Object:
    """The process's AppArmor profile; as with kubelet, one that is not loaded is an error."""
    if profile is None or profile["type"] != "Localhost":
        return {}
    name = profile["localhostProfile"]
    assert f"{name} (enforce)\n" in LOADED.read_text(), f"the profile {name} is not loaded"
    return {"apparmorProfile": name}


def _seccomp(profile: Object, capabilities: Sequence[str]) -> Object | None:
    """The seccomp profile: ours, or the runtime's default with the rules that these capabilities
    add; None for no filter.
    """
    if profile == {"type": "Unconfined"}:
        return None
    if profile == {"type": "Localhost", "localhostProfile": OURS.name}:
        return json.loads(OURS.read_text())
    assert profile == {"type": "RuntimeDefault"}, profile
    given = json.loads(SECCOMP.read_text())
    arch, native = MACHINES[platform.machine()]
    rules = []
    for rule in given["syscalls"]:
        more, less = rule.get("includes") or {}, rule.get("excludes") or {}
        wanted = set(more.get("caps") or ()) <= set(capabilities)
        unwanted = set(less.get("caps") or ()) & set(capabilities) or arch in (less.get("arches") or ())
        if wanted and not unwanted and ("arches" not in more or arch in more["arches"]):
            known = ("names", "action", "args", "errnoRet")
            rules.append({key: rule[key] for key in known if rule.get(key) is not None})
    return {
        "defaultAction": given["defaultAction"],
        "defaultErrnoRet": given["defaultErrnoRet"],
        "architectures": [native],
        "syscalls": rules,
    }


class Container:
    """One run of a container by runc; `process` is runc, which exits like the container. `cgroup`:
    its cgroup v2.
    """

    def __init__(self, config: Object, folder: Path, name: str, cgroup: Path, log: Path) -> None:
        self._name = name
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        self._state = ("--root", str(folder / "runc"))
        command = ("runc", *self._state, "run", "--bundle", str(folder), name)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*DIE_WITH_US, *inside(None, cgroup, *command)], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    @property
    def code(self) -> int | None:
        """The exit status; None while it runs."""
        return self.process.poll()

    def wait(self, seconds: float = 2 * PATIENCE) -> int:
        """Waits until it exits by itself; the exit status."""
        return self.process.wait(seconds)

    def stop(self, signal: str = "TERM") -> int:
        """Sends the signal to its process and waits; the exit status."""
        self._runc("kill", self._name, signal)
        return self.wait()

    def close(self) -> None:
        """Removes the container, killing it if it runs."""
        self._runc("delete", "--force", self._name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        shutil.rmtree(self._folder / "runc", ignore_errors=True)

    def exec(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command in it, as `kubectl exec` does."""
        return subprocess.run([*self.runc_exec, *command], capture_output=True, text=True, check=False)

    @property
    def runc_exec(self) -> tuple[str, ...]:
        """The command prefix that runs a command inside."""
        return ("runc", *self._state, "exec", self._name)

    def state(self) -> dict[str, Any] | None:
        """The state that runc reports ("pid": its process id); None if the container is gone."""
        done = self._runc("state", self._name)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def _runc(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["runc", *self._state, *arguments], capture_output=True, text=True, check=False)

# SPDX-License-Identifier: Apache-2.0
"""The uid of the Pod in a cgroup's path, as kubelet names it."""

from kbpf.kernel.system import pods
from tests.support.table import each_line

UID = "0a1b2c3d-0000-4000-8000-000000000001"


@each_line(
    "path, own, belongs",
    """
/kubepods/pod{uid}                                                                   | yes | yes
/kubepods/besteffort/pod{uid}                                                        | yes | yes
/kubepods/besteffort/pod{uid}/0123                                                   | no  | yes
/kubepods/pod{uid_}
/kubepods.slice/kubepods-pod{uid_}.slice                                             | yes | yes
/kubepods.slice/kubepods-burstable-pod{uid_}.slice/cri-1.scope                       | no  | yes
/docker.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{uid_}.slice  | yes | yes
/kubepods.slice/kubepods-pod{uid}.slice
/kubepods.slice/kubepods-pod{uid_}.scope
/kubepods/burstable
/system.slice/pod{uid}
/system.slice/foo-pod{uid_}.slice
/
""",
    own=lambda cell: cell == "yes",
    belongs=lambda cell: cell == "yes",
)
def test_uid_of_a_cgroup(path, own, belongs):
    """A cgroup ({uid}; {uid_}: with underscores), whether it is a Pod's own, and whether it belongs to the Pod."""
    path = path.format(uid=UID, uid_=UID.replace("-", "_"))
    assert [pods.pod_uid_of_folder(path) == UID, pods.pod_uid(path) == UID] == [own, belongs]


def test_uid_of_a_static_pod():
    assert pods.pod_uid(f"/kubepods/pod{32 * 'f'}/x/y") == 32 * "f"

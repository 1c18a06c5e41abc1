# SPDX-License-Identifier: Apache-2.0
"""Which devices get programs, on nodes as CNIs, clouds and operators set them up."""

from kbpf.dataplane.bpf.maps.layout import MAX_DEVICES
from kbpf.dataplane.bpf.packet_path.device_roles import (
    DeviceRole,
    assign_roles,
    count_left_out,
    decide_roles,
    describe_left_out,
    find_unmatched,
)
from kbpf.kernel.net.devices import Device
from tests.support.table import each_case, each_pair
from tests.values.dataplane.device_texts import devices

SKIPPED = DeviceRole.SKIPPED
SHAPES = {
    "a node without pods": """
        eth0            hardware/net      host
    """,
    "flannel: a bridge of pods, the overlay beside it": """
        eth0            hardware/net      host
        flannel.1       vxlan/net         host
        cni0            bridge/net        pod
        veth1a2b        veth/pod          skipped master=cni0
        veth3c4d        veth/pod          skipped master=cni0
    """,
    "flannel with br_netfilter": """
        eth0            hardware/net      host
        flannel.1       vxlan/net         host
        cni0            bridge/net/nf     pod
        veth1a2b        veth/pod          port    master=cni0
        veth3c4d        veth/pod/down     port    master=cni0
    """,
    "weave with br_netfilter": """
        eth0            hardware/net      host
        weave           bridge/net/nf     pod
        datapath        openvswitch       skipped
        vxlan-6784      vxlan             skipped master=datapath
        vethwe-bridge   veth              port    master=weave
        vethwepl0123456 veth/pod          port    master=weave
    """,
    "br_netfilter: a bridge of pods with an overlay and a dummy": """
        eth0            hardware/net      host
        br0             bridge/net/nf     pod
        vxlan5          vxlan             port    master=br0
        mac0            dummy             skipped master=br0
    """,
    "br_netfilter: a bond in a bridge with virtual machines": """
        eno1            hardware          skipped master=bond0
        bond0           bond              port    master=br0
        vnet0           tun               port    master=br0
        br0             bridge/net/nf     host
    """,
    "br_netfilter: a bridge in a VRF": """
        red             vrf               skipped
        br1             bridge/nf         pod     master=red
        veth1           veth/pod          port    master=br1
    """,
    "br_netfilter: a bridge of pods, while the operator names the host devices": """
        eth0            hardware/net      host
        br0             bridge/net/nf     skipped
        eth1            hardware          skipped master=br0
        cni0            bridge/nf         pod
        veth1a2b        veth/pod          port    master=cni0
        named eth0
    """,
    "br_netfilter: excluded bridges and ports": """
        eth0            hardware/net      host
        docker0         bridge/nf         skipped
        veth1           veth/pod          skipped master=docker0
        cni0            bridge/nf         pod
        veth2           veth/pod          skipped master=cni0
        excluded docker? veth2
    """,
    "flannel before its first pod: the bridge is empty and down": """
        eth0            hardware/net      host
        cni0            bridge/net/down   pod
    """,
    "flannel over WireGuard, host-gw: no overlay at all": """
        eth0            hardware/net      host
        flannel-wg      wireguard/net     host    type=none
    """,
    "calico, routed, IPIP": """
        eth0            hardware/net      host
        tunl0           ipip              host    type=tunnel
        cali0123456789a veth/pod          pod
        calibcdef012345 veth/pod          pod
    """,
    "flannel, IPIP": """
        eth0            hardware/net      host
        tunl0           ipip/down         host    type=tunnel
        flannel.ipip    ipip              host    type=tunnel
        cni0            bridge/net        pod
    """,
    "kube-router: a tunnel for each node of another subnet": """
        eth0            hardware/net      host
        tunl0           ipip/down         host    type=tunnel
        tun-19818002    ipip              host    type=tunnel
        kube-bridge     bridge/net        pod
    """,
    "calico, VXLAN and WireGuard": """
        eth0            hardware/net      host
        vxlan.calico    vxlan             host
        vxlan-v6.calico vxlan             host
        wireguard.cali  wireguard         host    type=none
        cali0123456789a veth/pod          pod
    """,
    "cilium, VXLAN: its own cable has both ends here": """
        eth0            hardware/net      host
        cilium_net      veth              host
        cilium_host     veth              host
        cilium_vxlan    vxlan             host
        lxc_health      veth/pod          pod
        lxc0a1b2c3d4e5f veth/pod          pod
    """,
    "cilium, netkit": """
        eth0            hardware/net      host
        lxc0a1b2c3d4e5f netkit/pod        pod
    """,
    "kind: the node is a container, eth0 is a cable; kindnet's ends have a /32": """
        eth0            veth/pod/net      host
        veth5e6f7a8b    veth/pod          pod
    """,
    "kind with calico": """
        eth0            veth/pod/net      host
        tunl0           ipip/down         host    type=tunnel
        cali0123456789a veth/pod          pod
    """,
    "weave: ports of the bridge are pods and a cable to its switch": """
        eth0            hardware/net      host
        weave           bridge/net        pod
        datapath        openvswitch       skipped
        vxlan-6784      vxlan             skipped master=datapath
        vethwe-datapath veth              skipped master=datapath
        vethwe-bridge   veth              skipped master=weave
        vethwepl0123456 veth/pod          skipped master=weave
    """,
    "AWS VPC CNI: routed cables, a second interface, a VLAN per pod with its own group": """
        ens5            hardware/net      host
        ens6            hardware          host
        eni0123456789a  veth/pod          pod
        vlanbcdef012345 veth/pod          pod
        vlan.eth.1      vlan              host
    """,
    "GKE, ptp: a cable per pod": """
        eth0            hardware/net      host
        gke0123456789a  veth/pod          pod
    """,
    "Azure, bridge mode: the uplink is a port of the pods' bridge": """
        eth0            hardware          skipped master=azure0
        azure0          bridge/net        host
        azv0123456      veth/pod          skipped master=azure0
    """,
    "kubenet: cbr0": """
        eth0            hardware/net      host
        cbr0            bridge/net        pod
        veth0a          veth/pod          skipped master=cbr0
    """,
    "a bridge of pods with an overlay and a dummy that gives it its address": """
        eth0            hardware/net      host
        br0             bridge/net        pod
        vxlan5          vxlan             skipped master=br0
        mac0            dummy             skipped master=br0
        veth0a          veth/pod          skipped master=br0
    """,
    "antrea: one switch for all, its gateway is the way in": """
        eth0            hardware/net      host
        ovs-system      openvswitch/down  skipped
        antrea-gw0      openvswitch/net   host
        coredns--1a2b3c veth/pod          skipped master=ovs-system
    """,
    "Open vSwitch with the uplink in it": """
        ovs-system      openvswitch/down  skipped
        eth0            hardware          skipped master=ovs-system
        br-ex           openvswitch/net   host
        br-int          openvswitch/down  skipped
        genev_sys_6081  geneve            skipped master=ovs-system
    """,
    "a bond of two, with VLANs on it": """
        eno1            hardware          skipped master=bond0
        eno2            hardware          skipped master=bond0
        bond0           bond              host
        bond0.100       vlan/net          host
        bond0.200       vlan/net          host
    """,
    "a team": """
        eno1            hardware          skipped master=team0
        team0           team/net          host
    """,
    "a bond in a bridge with virtual machines": """
        eno1            hardware          skipped master=bond0
        bond0           bond              skipped master=br0
        vnet0           tun               skipped master=br0
        br0             bridge/net        host
    """,
    "libvirt and docker beside the cluster": """
        eth0            hardware/net      host
        virbr0          bridge/net        host
        vnet1           tun               skipped master=virbr0
        docker0         bridge/net/down   pod
        br-0a1b2c3d4e5f bridge/net        pod
        veth9           veth/pod          skipped master=br-0a1b2c3d4e5f
    """,
    "macvlan of the host, macvtap of a virtual machine, ipvlan": """
        eth0            hardware/net      host
        shim0           macvlan/net       host
        ipvl0           ipvlan/net        host
        macvtap0        macvtap           skipped
    """,
    "VPNs: WireGuard, tun, PPP, XFRM": """
        eth0            hardware/net      host
        wg0             wireguard         host    type=none
        tun0            tun               host    type=none
        ppp0            ppp               host    type=512
        ipsec0          xfrm              host    type=none
    """,
    "a VRF: its ports show the packets": """
        red             vrf               skipped
        eth0            hardware/net      host    master=red
        br1             bridge            pod     master=red
        veth1           veth/pod          pod     master=red
    """,
    "what never carries a Service's packets": """
        eth0            hardware/net      host
        kube-ipvs0      dummy             skipped
        nodelocaldns    dummy/net         skipped
        kbpf-ipvs0      dummy             skipped
        kbpf-demo0      veth/pod          skipped
        ifb0            ifb/down          skipped
        nlmon0          nlmon             skipped type=824
        can0            can               skipped type=can
        ib0             ipoib/net         skipped type=infiniband
    """,
    "fallback devices of tunnel modules, down": """
        eth0            hardware/net      host
        tunl0           ipip/down         host    type=tunnel
        sit0            sit/down          host    type=776
        gre0            gre/down          host    type=778
        gretap0         gretap/down       host
        ip6tnl0         ip6tnl/down       host    type=769
    """,
    "an uplink that is down is there before its first packet": """
        eth1            hardware/down     host
    """,
    "named: only these are host devices, pods are found as ever": """
        eth0            hardware/net      host
        eth1            hardware/net      skipped
        flannel.1       vxlan/net         host
        wg0             wireguard/net     skipped type=none
        cni0            bridge            pod
        veth1a2b        veth/pod          skipped master=cni0
        cali0123456789a veth/pod          pod
        named eth0 flannel.*
    """,
    "named: a cable with an address in a subnet is a pod's, unless it is named": """
        eth0            veth/pod/net      host
        ve-box          veth/pod/net      pod
        named eth*
    """,
    "named: whatever it is, a port too": """
        eth0            hardware          host    master=br0
        br0             bridge/net        skipped
        dummy0          dummy/net         host
        named eth0 dummy0
    """,
    "named by a star: still not loopback, our own, and what has no IP": """
        eth0            hardware/net      host
        kbpf-ipvs0      dummy             skipped
        can0            can               skipped type=can
        eth1            hardware          skipped
        named *
        excluded eth1
    """,
    "names are compared letter by letter": """
        Eth0            hardware/net      skipped
        named eth*
    """,
    "excluded: uplinks and pods": """
        eth0            hardware/net      host
        eth1            hardware/net      skipped
        cali1           veth/pod          skipped
        docker0         bridge            skipped
        veth1           veth/pod          skipped master=docker0
        excluded eth1 cali* docker?
    """,
    "excluded wins over named": """
        eth0            hardware/net      skipped
        named eth*
        excluded eth0
    """,
}


@each_case("text", SHAPES)
def test_every_device_of_a_node_has_its_role(text):
    """In any order of the listing."""
    listing, patterns = devices(text)
    reasons = decide_roles(listing, **patterns)
    for order in (list(listing), reversed(listing)):
        chosen = assign_roles(order, **patterns)
        assert {device: str(chosen[device.ifindex]) for device in listing} == listing, reasons


@each_pair(
    "patterns, missing",
    """\
 →
eth0 →
eth* cali? →
eth2 → eth2
nosuch* eth0 eth → nosuch* eth
lo →
""",
)
def test_patterns_that_match_no_device_are_found(patterns, missing):
    listing, _ = devices("eth0 hardware/net host\ncali1 veth/pod pod")
    assert find_unmatched(tuple(listing), tuple(patterns.split())) == tuple(missing.split())


def test_a_port_with_an_unlisted_master_is_skipped():
    assert assign_roles([Device(7, "eth0", master=9)]) == {7: SKIPPED}


def test_every_role_has_a_reason():
    listing, _ = devices("eth0 hardware/net host\nbr0 bridge host\neth1 hardware skipped master=br0")
    assert {d.name: decide_roles(listing)[d.ifindex].reason for d in listing} == {
        "lo": "loopback",
        "eth0": "hardware",
        "br0": "bridge with the uplink eth1",
        "eth1": "port of br0",
    }


def test_devices_beyond_the_limit_are_left_out():
    """The newest of pods. Devices without programs do not count."""
    pods = [Device(index, f"cali{index}", "veth", peer_netns=1) for index in range(3, 5000)]
    uplink, loopback = Device(6000, "eth0"), Device(1, "lo", loopback=True)
    choices = decide_roles([loopback, *pods, uplink])
    served = [index for index, choice in choices.items() if choice.role is not SKIPPED]
    assert served == [*range(3, 2 + MAX_DEVICES), 6000]
    assert count_left_out(choices) == 5000 - (2 + MAX_DEVICES)
    assert count_left_out(decide_roles([*pods, uplink], excluded=("cali*",))) == 0
    line = describe_left_out(902)
    assert line.startswith("902 devices have no packet programs: 4,096 others have programs")

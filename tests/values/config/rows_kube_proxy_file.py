# SPDX-License-Identifier: Apache-2.0
"""The rows of test_kube_proxy_file.py."""

from tests.support.table import pairs

SAYS = pairs("""\
clientConnection: {kubeconfig: /k} → kubeconfig = /k
clientConnection: {kubeconfig: ''} → kubeconfig = none
hostnameOverride: ' Node-1 ' → node_name = node-1
bindAddress: 192.0.2.7 → bind_address = 192.0.2.7
bindAddress: 'fd00::7' → bind_address = fd00::7
bindAddress: 2001:10:1:2:3:4:5:6 → bind_address = 2001:10:1:2:3:4:5:6
bindAddress: 0.0.0.0 → bind_address = none
bindAddress: '::' → bind_address = none
bindAddress: '::' → serving.healthz = [::]:10256
bindAddress: '::' → serving.metrics = [::1]:10249
bindAddress: 192.0.2.7 → serving.healthz = 0.0.0.0:10256
healthzBindAddress: 192.0.2.7 → serving.healthz = 192.0.2.7:10256
healthzBindAddress: '192.0.2.7:1' → serving.healthz = 192.0.2.7:1
healthzBindAddress: 'fd00::1' → serving.healthz = [fd00::1]:10256
metricsBindAddress: 0.0.0.0 → serving.metrics = 0.0.0.0:10249
metricsBindAddress: '[::]:9' → serving.metrics = [::]:9
metricsBindAddress: '' → serving.metrics = 127.0.0.1:10249
metricsBindAddress: '010.0.0.1:080' → serving.metrics = 10.0.0.1:80
bindAddressHardFail: true → serving.hard_fail = true
mode: '' → proxy_mode = ''
mode: iptables → proxy_mode = iptables
mode: nftables → proxy_mode = nftables
mode: ipvs → proxy_mode = ipvs
mode: ipvs → mode = auto
iptables: {masqueradeBit: 3} → masquerade_bit = 3
iptables: {masqueradeBit: 0} → masquerade_bit = 0
mode: ipvs; iptables: {masqueradeBit: 3} → masquerade_bit = 3
mode: nftables; iptables: {masqueradeBit: 3} → masquerade_bit = 14
mode: nftables; nftables: {masqueradeBit: 4} → masquerade_bit = 4
nftables: {masqueradeBit: 4} → masquerade_bit = 14
iptables: {masqueradeAll: true} → masquerade_all = true
nftables: {masqueradeAll: true} → masquerade_all = false
mode: nftables; nftables: {masqueradeAll: true} → masquerade_all = true
mode: nftables; iptables: {masqueradeAll: true} → masquerade_all = false
mode: ipvs; iptables: {masqueradeAll: true} → masquerade_all = true
iptables: {syncPeriod: 1m} → serving.late_seconds = 120.0
iptables: {syncPeriod: 0s} → serving.late_seconds = 60.0
mode: nftables; nftables: {syncPeriod: 5s} → serving.late_seconds = 10.0
mode: ipvs; ipvs: {syncPeriod: 5s} → serving.late_seconds = 10.0
nftables: {syncPeriod: 5s} → serving.late_seconds = 60.0
iptables: {minSyncPeriod: 0s} → min_sync_period = 0.0
iptables: {minSyncPeriod: 10s} → min_sync_period = 10.0
iptables: {minSyncPeriod: 30s} → min_sync_period = 30.0
mode: nftables; nftables: {minSyncPeriod: 1500ms} → min_sync_period = 1.5
mode: ipvs; ipvs: {minSyncPeriod: 2s} → min_sync_period = 2.0
ipvs: {scheduler: mh} → ipvs_scheduler = mh
ipvs: {scheduler: ''} → ipvs_scheduler = rr
ipvs: {strictARP: true} → strict_arp = true
iptables: {localhostNodePorts: false} → localhost_node_ports = false
iptables: {localhostNodePorts: true} → localhost_node_ports = true
iptables: {localhostNodePorts: null} → localhost_node_ports = true
mode: nftables → localhost_node_ports = false
mode: ipvs → localhost_node_ports = false
nodePortAddresses: [primary] → localhost_node_ports = false
nodePortAddresses: [10.0.0.0/8] → localhost_node_ports = false
nodePortAddresses: [10.0.0.0/8, 127.0.0.0/8] → localhost_node_ports = true
nodePortAddresses: [127.0.0.1/32] → localhost_node_ports = true
nodePortAddresses: [0.0.0.0/0] → localhost_node_ports = true
nodePortAddresses: ['fd00::/8'] → localhost_node_ports = true
nodePortAddresses: [] → all_node_port_addresses = true
nodePortAddresses: null → all_node_port_addresses = true
mode: ipvs → all_node_port_addresses = true
mode: nftables → all_node_port_addresses = false
nodePortAddresses: [primary] → all_node_port_addresses = false
nodePortAddresses: [primary] → node_port_addresses = ()
nodePortAddresses: [primary] → primary_node_ports = false
nodePortAddresses: [10.0.0.0/8] → primary_node_ports = false
nodePortAddresses: [10.0.0.0/8, 'fd00::/8'] → node_port_addresses = 10.0.0.0/8, fd00::/8
detectLocalMode: '' → detect_local_mode = ''
clusterCIDR: 10.0.0.0/8 → detect_local_mode = ClusterCIDR
clusterCIDR: '10.0.0.0/8,fd00::/48' → cluster_cidrs = 10.0.0.0/8, fd00::/48
detectLocalMode: ClusterCIDR → detect_local_mode = ClusterCIDR
detectLocalMode: NodeCIDR → detect_local_mode = NodeCIDR
detectLocalMode: NodeCIDR; clusterCIDR: 10.0.0.0/8 → cluster_cidrs = ()
detectLocalMode: BridgeInterface; detectLocal: {bridgeInterface: cni0} → pod_bridge_interface = cni0
detectLocalMode: InterfaceNamePrefix; detectLocal: {interfaceNamePrefix: cali} → pod_interface_name_prefix = cali
configSyncPeriod: 0s → config_sync_period = 900.0
configSyncPeriod: 1m → config_sync_period = 60.0
oomScoreAdj: 0 → oom_score_adj = 0
oomScoreAdj: 5.0 → oom_score_adj = 5
oomScoreAdj: null → oom_score_adj = -999
conntrack: {maxPerCore: 0} → conntrack.max_per_core = 0
conntrack: {maxPerCore: 7} → conntrack.max_per_core = 7
conntrack: {min: 0} → conntrack.least = 0
conntrack: {min: 1.048576e+06} → conntrack.least = 1048576
conntrack: {min: 1e+06} → conntrack.least = 1000000
conntrack: {tcpEstablishedTimeout: 0s} → conntrack.tcp_established = 0
conntrack: {tcpEstablishedTimeout: 2h} → conntrack.tcp_established = 7200
conntrack: {tcpEstablishedTimeout: null} → conntrack.tcp_established = 86400
conntrack: {tcpCloseWaitTimeout: 1m30s} → conntrack.tcp_close_wait = 90
conntrack: {tcpBeLiberal: true} → conntrack.tcp_be_liberal = true
conntrack: {udpTimeout: 30s} → conntrack.udp = 30
conntrack: {udpStreamTimeout: 2m} → conntrack.udp_stream = 120
ipvs: {tcpTimeout: 1h} → ipvs_times.tcp = 3600
mode: ipvs; ipvs: {tcpTimeout: 1h0m0.9s} → ipvs_times.tcp = 3600
mode: ipvs; ipvs: {tcpFinTimeout: 30s} → ipvs_times.tcp_fin = 30
mode: ipvs; ipvs: {udpTimeout: 10s} → ipvs_times.udp = 10
mode: ipvs; ipvs: {tcpTimeout: 0s} → ipvs_times.tcp = 0
ipvs: {tcpTimeout: -1s} → ipvs_times.tcp = 0
logging: {format: json} → log_format = json
logging: {verbosity: 4} → log_level = debug
logging: {verbosity: 2} → log_level = info
iptables: null → masquerade_bit = 14
nodePortAddresses: [primary, 10.0.0.0/8] → primary_node_ports = true
nodePortAddresses: [10.0.0.0/8, primary] → node_port_addresses = 10.0.0.0/8
nodePortAddresses: [10.0.0.0/8, primary] → localhost_node_ports = false
nodePortAddresses: [localhost] → node_port_addresses = 127.0.0.0/8, ::1/128
nodePortAddresses: [localhost] → localhost_node_ports = true
nodePortAddresses: [primary, localhost] → primary_node_ports = true
nodePortAddresses: [primary, localhost] → localhost_node_ports = true
mode: nftables; nodePortAddresses: [primary, localhost] → localhost_node_ports = false
nodePortAddresses: [all] → all_node_port_addresses = true
nodePortAddresses: [all] → localhost_node_ports = true
nodePortAddresses: [primary, all, localhost] → all_node_port_addresses = true
nodePortAddresses: [primary, all, localhost] → primary_node_ports = false
mode: nftables; nodePortAddresses: [all] → all_node_port_addresses = true
mode: nftables; nodePortAddresses: [all] → localhost_node_ports = false
""")
"""Fields of kube-proxy's document → a field of Config and its value."""
GATE = pairs("""\
true [primary, localhost] → true true
null [primary, localhost] → false true
false [primary, localhost] → false false
null [primary] → false false
null [localhost] → false true
true [127.0.0.0/8] → true true
true [127.0.0.1/32] → true true
true [127.0.0.0/32] → true false
true [127.0.1.0/24] → true false
true [127.0.0.0/24] → true true
true [127.128.0.0/9] → true false
true [126.0.0.0/7] → false true
true [0.0.0.0/1] → false true
true [128.0.0.0/1] → false false
true ['::1/128'] → true true
true ['::/127'] → false true
true ['::/64'] → false true
true ['::/1'] → false true
true ['::2/127'] → false false
true [primary] → false false
true [10.0.0.0/8] → false false
true [0.0.0.0/0] → false false
true ['::/0'] → false false
true [0.0.0.0/0, 0.0.0.0/1] → false true
true [all] → false false
true [all, localhost] → true true
""")
"""In mode nftables: the gate KubeProxyNFTablesLocalhostNodePorts (null: unset), nodePortAddresses →
localhost_node_ports with kubernetesVersion 1.37 and 1.38 (nodeport_addresses.go)."""
WRONG = pairs("""\
mode: userspace → 'userspace' (.mode); use iptables
mode: kernelspace → (.mode)
bindAddress: here → 'here' (.bindAddress)
healthzBindAddress: '0.0.0.0:0' → 0.0.0.0:0' (.healthzBindAddress)
metricsBindAddress: 'localhost:1' → (.metricsBindAddress)
iptables: {masqueradeBit: 32} → '32' (.iptables.masqueradeBit)
mode: nftables; iptables: {masqueradeBit: -1} → (.iptables.masqueradeBit)
mode: nftables; nftables: {masqueradeBit: 32} → (.nftables.masqueradeBit)
iptables: {syncPeriod: -1s} → (.iptables.syncPeriod)
iptables: {syncPeriod: soon} → 'soon' (.iptables.syncPeriod)
iptables: {syncPeriod: 30} → expected a string, got an integer (.iptables.syncPeriod); write 30s
configSyncPeriod: 1.5 → got a fraction (.configSyncPeriod); write 1.5s
conntrack: {udpTimeout: 0} → got an integer (.conntrack.udpTimeout); write 0s
conntrack: {udpTimeout: true} → expected a string, got a boolean (.conntrack.udpTimeout)
iptables: {minSyncPeriod: 31s} → 31s (.iptables.syncPeriod)
mode: ipvs; ipvs: {minSyncPeriod: -1s} → (.ipvs.minSyncPeriod)
mode: ipvs; ipvs: {tcpTimeout: -1s} → (.ipvs.tcpTimeout)
mode: ipvs; ipvs: {excludeCIDRs: [10.0.0.0/8, x]} → 'x' (.ipvs.excludeCIDRs[1])
mode: ipvs; ipvs: {scheduler: best} → 'best' (.ipvs.scheduler)
configSyncPeriod: -1s → (.configSyncPeriod)
nodePortAddresses: [primary, second] → 'second' (.nodePortAddresses[1])
nodePortAddresses: [all, 10.0.0.0/33] → '10.0.0.0/33' (.nodePortAddresses[1])
nodePortAddresses: [Localhost] → 'Localhost' (.nodePortAddresses[0])
nodePortAddresses: [primary, 10.0.0.0/8, primary] → 'primary' is given twice (.nodePortAddresses[2])
nodePortAddresses: [localhost, 10.0.0.0/8, localhost] → 'localhost' is given twice (.nodePortAddresses[2])
nodePortAddresses: [all, 10.0.0.0/8, all] → 'all' is given twice (.nodePortAddresses[2])
nodePortAddresses: primary → expected a list, got a string (.nodePortAddresses)
detectLocalMode: Cluster → 'Cluster' (.detectLocalMode)
detectLocalMode: BridgeInterface → (.detectLocal.bridgeInterface)
detectLocalMode: InterfaceNamePrefix → (.detectLocal.interfaceNamePrefix)
detectLocalMode: BridgeInterface; detectLocal: {bridgeInterface: a/b} → 'a/b' (.detectLocal.bridgeInterface)
clusterCIDR: 10.0.0.0 → '10.0.0.0' (.clusterCIDR)
clusterCIDR: '10.0.0.0/8,10.1.0.0/16' → more than one network of a family: '10.0.0.0/8,10.1.0.0/16' (.clusterCIDR)
oomScoreAdj: 1001 → '1001' (.oomScoreAdj)
oomScoreAdj: 5.5 → expected an integer, got a fraction (.oomScoreAdj)
conntrack: {min: 1e400} → expected an integer, got a string (.conntrack.min)
oomScoreAdj: low → expected an integer, got a string (.oomScoreAdj)
conntrack: {maxPerCore: -1} → -1 (.conntrack.maxPerCore)
conntrack: {min: -1} → -1 (.conntrack.min)
conntrack: {tcpEstablishedTimeout: -1s} → (.conntrack.tcpEstablishedTimeout)
conntrack: {udpTimeout: -1s} → (.conntrack.udpTimeout)
conntrack: [] → expected an object (.conntrack)
clientConnection: {burst: -1} → -1 (.clientConnection.burst)
logging: {format: xml} → 'xml' (.logging.format)
hostnameOverride: 7 → expected a string, got an integer (.hostnameOverride)
hostnameOverride: ' ' → (.hostnameOverride)
bindAddressHardFail: 'yes' → expected true or false, got a string (.bindAddressHardFail)
mode: x; oomScoreAdj: 5000; bindAddress: 1; clusterCIDR: z → (.bindAddress) | (.oomScoreAdj) | (.mode) | (.clusterCIDR)
""")
"""Fields → words of each error."""
PATHS = pairs("""\
bindAddress: 10.10.12.11:2000 → bindAddress
healthzBindAddress: 0.0.0.0:x; metricsBindAddress: 127.0.0.1:x → healthzBindAddress metricsBindAddress
iptables: {masqueradeBit: 32} → iptables.masqueradeBit
mode: nftables; iptables: {masqueradeBit: 32} → iptables.masqueradeBit
mode: nftables; nftables: {masqueradeBit: 32} → nftables.masqueradeBit
oomScoreAdj: 1001 → oomScoreAdj
conntrack: {maxPerCore: -1, min: -1} → conntrack.maxPerCore conntrack.min
conntrack: {tcpEstablishedTimeout: -1s} → conntrack.tcpEstablishedTimeout
conntrack: {tcpCloseWaitTimeout: -1s} → conntrack.tcpCloseWaitTimeout
conntrack: {udpTimeout: -1s, udpStreamTimeout: -1s} → conntrack.udpTimeout conntrack.udpStreamTimeout
mode: ipvs; ipvs: {tcpTimeout: -1s, tcpFinTimeout: -1s} → ipvs.tcpTimeout ipvs.tcpFinTimeout
mode: ipvs; ipvs: {udpTimeout: -1s, excludeCIDRs: [192.168.0.0/16, invalid]} → ipvs.udpTimeout ipvs.excludeCIDRs[1]
clientConnection: {burst: -1} → clientConnection.burst
configSyncPeriod: -1s → configSyncPeriod
mode: invalid; iptables: {syncPeriod: -1s} → mode iptables.syncPeriod
detectLocalMode: invalid → detectLocalMode
nodePortAddresses: [192.168.0.0/16, invalid] → nodePortAddresses[1]
nodePortAddresses: [x, primary, 192.168.0.0/16, primary, z] → nodePortAddresses[0] nodePortAddresses[3] \
nodePortAddresses[4]
logging: {format: invalid} → logging.format
detectLocalMode: BridgeInterface → detectLocal.bridgeInterface
detectLocalMode: InterfaceNamePrefix → detectLocal.interfaceNamePrefix
clusterCIDR: 192.168.0.0/16,invalid → clusterCIDR
clusterCIDR: 192.168.0.0/16,10.0.0.0/8 → clusterCIDR
iptables: {syncPeriod: -1s} → iptables.syncPeriod
iptables: {minSyncPeriod: -1s} → iptables.minSyncPeriod
iptables: {syncPeriod: 1s, minSyncPeriod: 2s} → iptables.syncPeriod
mode: iptables; iptables: {syncPeriod: 1s, minSyncPeriod: 2s} → iptables.syncPeriod
mode: ipvs; ipvs: {syncPeriod: -1s} → ipvs.syncPeriod
mode: ipvs; ipvs: {minSyncPeriod: -1s} → ipvs.minSyncPeriod
mode: ipvs; ipvs: {syncPeriod: 1s, minSyncPeriod: 2s} → ipvs.syncPeriod
mode: nftables; nftables: {syncPeriod: -1s} → nftables.syncPeriod
mode: nftables; nftables: {minSyncPeriod: -1s} → nftables.minSyncPeriod
mode: nftables; nftables: {syncPeriod: 1s, minSyncPeriod: 2s} → nftables.syncPeriod
featureGates: {UnknownFeature: true} →
showHiddenMetricsForVersion: invalid →
healthzBindAddress: 0.0.0.0; metricsBindAddress: 127.0.0.1 →
mode: kernelspace → mode
""")
"""Fields → the paths of the errors: TestValidateV1Alpha1FieldPaths and TestValidateV1Alpha1SyncPeriodPaths of
Kubernetes 1.38, without a period of zero, which a file cannot have. Three rows differ: kbpf ignores unknown gates and
showHiddenMetricsForVersion with a line of the log, and a port may be omitted (in a file of kube-proxy, too)."""
NOT_USED = pairs("""\
featureGates: {A: true} → featureGates
clientConnection: {acceptContentTypes: a/b} → clientConnection.acceptContentTypes
clientConnection: {contentType: application/cbor} → clientConnection.contentType
clientConnection: {qps: 50} → clientConnection.qps
clientConnection: {burst: 100} → clientConnection.burst
logging: {flushFrequency: 1s} → logging.flushFrequency
logging: {vmodule: [{filePattern: a, verbosity: 9}]} → logging.vmodule
logging: {options: {json: {splitStream: true}}} → logging.options
showHiddenMetricsForVersion: '1.35' → showHiddenMetricsForVersion
enableProfiling: true → enableProfiling
iptables: {snatNodeInternalIP: true} → iptables.snatNodeInternalIP
ipvs: {excludeCIDRs: [10.0.0.0/8]} → ipvs.excludeCIDRs
winkernel: {enableDSR: true} → winkernel
windowsRunAsService: true → windowsRunAsService
portRange: 1-2 → portRange
udpIdleTimeout: 250ms → udpIdleTimeout
""")


EVENTS = pairs("""\
mode missing: PROXY → KubeProxyDefaultMode
mode empty: PROXY mode: '' → KubeProxyDefaultMode
mode missing, NodePorts at primary addresses: PROXY nodePortAddresses: [primary] →
mode missing, NodePorts at all addresses: PROXY nodePortAddresses: [0.0.0.0/0] → KubeProxyDefaultMode
mode iptables: PROXY mode: iptables →
mode nftables: PROXY mode: nftables →
mode ipvs: PROXY mode: ipvs → IPVSDeprecation
kbpf document: OWN →
kbpf document, flag --proxy-mode: OWN --proxy-mode ipvs → IPVSDeprecation
kbpf document, mode ipvs: OWN mode: ipvs →
""")
"""A document, perhaps with a flag → the reasons of the Events."""

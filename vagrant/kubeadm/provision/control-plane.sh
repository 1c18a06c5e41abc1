#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# control-plane.sh ADDRESS TOKEN sets up the control plane, with kbpf instead of kube-proxy.
#
# It can be repeated, also after a failure: an incomplete `kubeadm init` is reset first. KBPF_TREE is the
# path of the tree.
set -eu
address=$1 token=$2 tree=${KBPF_TREE:-/kbpf}
pods=10.244.0.0/16 # the network in flannel's manifest
flannel=v0.28.9
ready=/etc/kubernetes/initialised

work=$(mktemp -d)
doing=""
trap '[ $? = 0 ] || echo "control-plane.sh: failed at: $doing" >&2; rm -rf "$work"' EXIT

doing="kubeadm init"
if [ ! -e "$ready" ]; then
	[ ! -e /etc/kubernetes/pki ] || kubeadm reset --force
	# Addresses are explicit, since on VirtualBox the first device of all machines has the same address.
	# The token does not expire, since a worker may join late.
	release=$(kubeadm version -o short)
	cat >"$work/init.yaml" <<-END
		apiVersion: kubeadm.k8s.io/v1beta4
		kind: InitConfiguration
		bootstrapTokens: [{token: $token, ttl: 0s}]
		localAPIEndpoint: {advertiseAddress: $address}
		nodeRegistration:
		  kubeletExtraArgs: [{name: node-ip, value: $address}]
		---
		apiVersion: kubeadm.k8s.io/v1beta4
		kind: ClusterConfiguration
		kubernetesVersion: $release
		networking: {podSubnet: $pods}
	END
	kubeadm init --config="$work/init.yaml" --skip-phases=addon/kube-proxy
	touch "$ready"
fi

doing="kubectl's configuration"
export KUBECONFIG=/etc/kubernetes/admin.conf
for home in /root /home/vagrant; do
	[ -d "$home" ] || continue
	install -D -m 600 "$KUBECONFIG" "$home/.kube/config"
	chown -R --reference="$home" "$home/.kube"
done

doing="kbpf"
# Before flannel, which connects to the API server by its ClusterIP.
sh "$tree/vagrant/kubeadm/provision/kbpf.sh" "https://$address:6443" "$pods" "$tree"
kubectl -n kube-system rollout status ds/kube-proxy --timeout=10m

doing="flannel $flannel"
url=https://github.com/flannel-io/flannel/releases/download/$flannel/kube-flannel.yml
curl -fsSL --retry 5 -o "$work/kube-flannel.yml" "$url"
# flannel must use the device with the node's address, not that of the default route.
cat >"$work/kustomization.yaml" <<-'END'
	resources: [kube-flannel.yml]
	patches:
	  - target: {kind: DaemonSet, name: kube-flannel-ds}
	    patch: |
	      - op: add
	        path: /spec/template/spec/containers/0/env/-
	        value: {name: NODE_ADDRESS, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
	      - op: add
	        path: /spec/template/spec/containers/0/args/-
	        value: --iface=$(NODE_ADDRESS)
END
kubectl apply -k "$work"
kubectl -n kube-flannel rollout status ds/kube-flannel-ds --timeout=10m

doing="the cluster's DNS"
# CoreDNS's are the first pods with their own network that need the API server.
kubectl -n kube-system rollout status deploy/coredns --timeout=10m

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# worker.sh ADDRESS CONTROL-PLANE TOKEN joins a worker to the cluster.
#
# It waits for the control plane, which libvirt sets up at the same time. It can be repeated, also after a
# failure: an incomplete `kubeadm join` is reset first.
set -eu
address=$1 control_plane=$2 token=$3
ready=/etc/kubernetes/joined
[ ! -e "$ready" ] || exit 0

config=$(mktemp)
trap '[ $? = 0 ] || echo "worker.sh: failed at: kubeadm join" >&2; rm -f "$config"' EXIT

[ ! -e /etc/kubernetes/pki ] || kubeadm reset --force
cat >"$config" <<-END
	apiVersion: kubeadm.k8s.io/v1beta4
	kind: JoinConfiguration
	discovery:
	  bootstrapToken:
	    apiServerEndpoint: $control_plane:6443
	    token: $token
	    unsafeSkipCAVerification: true
	nodeRegistration:
	  kubeletExtraArgs: [{name: node-ip, value: $address}]
	timeouts: {discovery: 60m}
END
kubeadm join --config="$config"
touch "$ready"

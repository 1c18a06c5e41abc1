#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kbpf.sh API-SERVER POD-NETWORK [TREE] installs kbpf instead of kube-proxy, as docs/install.md describes.
#
# KUBECTL: the kubectl command with its arguments.
set -eu
server=$1 pods=$2 tree=${3:-/kbpf}

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$tree/manifests/." "$copy"
sed -i "s|https://CONTROL-PLANE-ENDPOINT:6443|$server|" "$copy/overlays/kubeadm-new/kubeconfig.conf"
sed -i "s|^clusterCIDR: .*|clusterCIDR: \"$pods\"|" "$copy/overlays/kubeadm-new/config.conf"
${KUBECTL:-kubectl} apply -k "$copy/overlays/kubeadm-new"

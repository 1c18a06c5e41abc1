#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# node.sh VERSION prepares a machine for kubeadm, with kbpf's image in containerd.
#
# It can be repeated: Kubernetes stays as it is, the image is built again. KBPF_TREE is the path of the
# tree.
set -eu
version=$1 tree=${KBPF_TREE:-/kbpf}
image=docker.io/library/kbpf:0.1.0 # the full name of the manifests' kbpf:0.1.0
export DEBIAN_FRONTEND=noninteractive

work=$(mktemp -d)
doing=""
trap '[ $? = 0 ] || echo "node.sh: failed at: $doing" >&2; rm -rf "$work"' EXIT

doing="swap, modules, sysctls"
swapoff -a
sed -i '/\sswap\s/d' /etc/fstab
printf 'overlay\nbr_netfilter\n' >/etc/modules-load.d/kubernetes.conf
modprobe -a overlay br_netfilter
cat >/etc/sysctl.d/kubernetes.conf <<-END
	net.bridge.bridge-nf-call-iptables = 1
	net.bridge.bridge-nf-call-ip6tables = 1
	net.ipv4.ip_forward = 1
	net.ipv6.conf.all.forwarding = 1
END
sysctl --quiet --system

doing="Debian's packages"
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates curl gpg containerd runc buildah

doing="containerd's configuration"
# containerd's own defaults, since Debian's file has another path for the CNI plugins.
containerd config default >"$work/default"
sed 's/SystemdCgroup = false/SystemdCgroup = true/' "$work/default" >"$work/config.toml"
grep -q 'SystemdCgroup = true' "$work/config.toml"
mkdir -p /etc/containerd
cp "$work/config.toml" /etc/containerd/config.toml
systemctl restart containerd

doing="Kubernetes $version"
# Packages are held, as the last step, since kubelet must not be newer than the control plane. If they
# are held already, this is not the first run and nothing is installed.
if [ -z "$(apt-mark showhold kubeadm)" ]; then
	url=https://pkgs.k8s.io/core:/stable:/$version/deb
	curl -fsSL --retry 5 -o "$work/Release.key" "$url/Release.key"
	mkdir -p /etc/apt/keyrings
	gpg --dearmor --yes -o /etc/apt/keyrings/kubernetes.gpg "$work/Release.key"
	echo "deb [signed-by=/etc/apt/keyrings/kubernetes.gpg] $url/ /" \
		>/etc/apt/sources.list.d/kubernetes.list
	apt-get update -qq
	apt-get install -y -qq kubelet kubeadm kubectl
	apt-mark hold kubelet kubeadm kubectl >/dev/null
fi

doing="kbpf's image"
# In a chroot with the machine's network: a separate network for buildah would need more packages.
buildah build --quiet --isolation=chroot --layers --tag "$image" "$tree"
buildah push --quiet "$image" "docker-archive:$work/kbpf.tar:$image"
ctr --namespace k8s.io images import "$work/kbpf.tar"

#!/bin/sh
# A machine that kubeadm can use, with kbpf's image in containerd: node.sh VERSION ADDRESS
set -eu
version=$1 address=$2
export DEBIAN_FRONTEND=noninteractive

# ---- what kubeadm asks of a node
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

# ---- containerd, kubeadm
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates curl gpg containerd runc buildah
mkdir -p /etc/containerd /etc/apt/keyrings
containerd config default | sed 's/SystemdCgroup = false/SystemdCgroup = true/' \
	>/etc/containerd/config.toml
systemctl restart containerd
url=https://pkgs.k8s.io/core:/stable:/$version/deb
curl -fsSL "$url/Release.key" | gpg --dearmor --yes -o /etc/apt/keyrings/kubernetes.gpg
echo "deb [signed-by=/etc/apt/keyrings/kubernetes.gpg] $url/ /" \
	>/etc/apt/sources.list.d/kubernetes.list
apt-get update -qq
apt-get install -y -qq kubelet kubeadm kubectl
# Vagrant's machines have a first network that all share the address of.
echo "KUBELET_EXTRA_ARGS=--node-ip=$address" >/etc/default/kubelet

# ---- kbpf
archive=$(mktemp -d)/kbpf.tar
buildah build --quiet --tag docker.io/library/kbpf:0.1.0 /kbpf
buildah push --quiet docker.io/library/kbpf:0.1.0 "docker-archive:$archive:docker.io/library/kbpf:0.1.0"
ctr --namespace k8s.io images import "$archive"
rm -r "$(dirname "$archive")"

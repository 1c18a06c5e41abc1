#!/bin/sh
# The control plane, without kube-proxy and with kbpf: control-plane.sh ADDRESS
set -eu
address=$1
pods=10.244.0.0/16
here=$(dirname "$0")
[ -e "$here/kbpf.sh" ] || here=/kbpf/vagrant/kubeadm/provision # Vagrant runs a copy

if [ ! -e /etc/kubernetes/admin.conf ]; then
	# A token that everybody can read: this cluster is for tests.
	kubeadm init --skip-phases=addon/kube-proxy --token abcdef.0123456789abcdef \
		--apiserver-advertise-address="$address" --pod-network-cidr="$pods"
fi
export KUBECONFIG=/etc/kubernetes/admin.conf
for home in /root /home/vagrant; do
	[ -d "$home" ] || continue
	install -D -m 600 "$KUBECONFIG" "$home/.kube/config"
	chown -R --reference="$home" "$home/.kube"
done

sh "$here/kbpf.sh" "https://$address:6443" "$pods"
kubectl apply -f https://github.com/flannel-io/flannel/releases/latest/download/kube-flannel.yml
kubectl -n kube-system rollout status ds/kube-proxy --timeout=5m

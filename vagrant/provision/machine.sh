#!/bin/sh
# A machine of any distribution that can run the suite: machine.sh [TREE]
set -eu
tree=${1:-/kbpf}
here=$tree/vagrant/provision

if command -v apt-get >/dev/null; then
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends debootstrap debian-archive-keyring ca-certificates
	# Ubuntu has sctp and others in a package of their own.
	apt-get install -y -qq "linux-modules-extra-$(uname -r)" 2>/dev/null || true
elif command -v dnf >/dev/null; then
	dnf install -y -q debootstrap iproute
	dnf install -y -q "kernel-modules-extra-$(uname -r)" || true
	setenforce 0 || true # it knows nothing of a Debian in a folder
else
	echo "neither apt-get nor dnf: put a Debian 12 into /var/lib/kbpf-tests yourself" >&2
	exit 1
fi

sh "$here/root.sh" /var/lib/kbpf-tests
sh "$here/kernel.sh"
sh "$here/enter.sh" /var/lib/kbpf-tests "$tree" make venv

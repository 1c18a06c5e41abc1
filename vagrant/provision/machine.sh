#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# machine.sh [TREE] prepares a machine of any distribution for the test suite.
set -eu
tree=${1:-/kbpf}
here=$tree/vagrant/provision

if command -v apt-get >/dev/null; then
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends debootstrap debian-archive-keyring ca-certificates
	# Ubuntu has sctp and other modules in a separate package.
	apt-get install -y -qq "linux-modules-extra-$(uname -r)" 2>/dev/null || true
elif command -v dnf >/dev/null; then
	dnf install -y -q debootstrap iproute
	dnf install -y -q "kernel-modules-extra-$(uname -r)" || true
	setenforce 0 || true # SELinux's policy does not cover a Debian chroot
else
	echo "machine.sh: neither apt-get nor dnf found; install a Debian 12 in /var/lib/kbpf-tests by hand" >&2
	exit 1
fi

sh "$here/root.sh" /var/lib/kbpf-tests
sh "$here/kernel.sh"
sh "$here/enter.sh" /var/lib/kbpf-tests "$tree" make venv

#!/bin/sh
# The suite on this machine's kernel, all of it or a part: suite.sh [PYTEST ARGUMENTS...]
#
# KBPF_TREE is where the tree is. No machine in this machine: `make test-kernels` is left out.
set -eu
tree=${KBPF_TREE:-/kbpf}
sh "$tree/vagrant/provision/kernel.sh"
exec sh "$tree/vagrant/provision/enter.sh" /var/lib/kbpf-tests "$tree" \
	env HOME=/root make test "PYTEST=${*:-tests}"

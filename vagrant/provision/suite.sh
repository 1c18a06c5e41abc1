#!/bin/sh
# The whole suite on this machine's kernel: suite.sh [PYTEST ARGUMENTS...]. KBPF_TREE is where it is.
set -eu
tree=${KBPF_TREE:-/kbpf}
sh "$tree/vagrant/provision/kernel.sh"
exec sh "$tree/vagrant/provision/enter.sh" /var/lib/kbpf-tests "$tree" \
	env HOME=/root make test "PYTEST=$*"

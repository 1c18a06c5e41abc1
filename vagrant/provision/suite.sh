#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# suite.sh [PYTEST ARGUMENTS...] runs the test suite, or a part of it, on this machine's kernel.
#
# KBPF_TREE is the path of the tree. `make test-kernels` is not run: it would nest virtual machines.
set -eu
tree=${KBPF_TREE:-/kbpf}
sh "$tree/vagrant/provision/kernel.sh"
exec sh "$tree/vagrant/provision/enter.sh" /var/lib/kbpf-tests "$tree" \
	env HOME=/root make test "PYTEST=${*:-tests}"

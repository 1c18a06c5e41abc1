#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# enter.sh ROOT TREE COMMAND... runs a command in a chroot, with the machine's kernel and this tree.
#
# The mounts are made in a new mount namespace, so they disappear with the command.
set -eu
if [ "${KBPF_ENTERED:-}" != 1 ]; then
	KBPF_ENTERED=1 exec unshare --mount --propagation slave sh "$0" "$@"
fi
root=$1 tree=$2
shift 2

# The root must be a mount point: `ip -n` and unshare change the mount propagation of /.
mount --bind "$root" "$root"
for each in proc sys dev run; do
	mkdir -p "$root/$each"
	mount --rbind "/$each" "$root/$each"
done
if [ -d /lib/modules ]; then
	mkdir -p "$root/lib/modules"
	mount --bind /lib/modules "$root/lib/modules"
fi
mkdir -p "$root$tree"
mount --bind "$tree" "$root$tree"
cp /etc/resolv.conf "$root/etc/resolv.conf"

unset KBPF_ENTERED
# shellcheck disable=SC2016
exec chroot "$root" sh -c 'cd "$1" && shift && exec "$@"' sh "$tree" "$@"

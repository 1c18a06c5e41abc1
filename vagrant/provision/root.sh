#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# root.sh ROOT [MIRROR] creates a Debian 12 chroot with the packages that `make` needs first.
set -eu
root=$1 mirror=${2:-http://deb.debian.org/debian}

[ ! -e "$root/etc/kbpf-tests" ] || exit 0
rm -rf "$root"
debootstrap --variant=minbase --include=ca-certificates,make,kmod bookworm "$root" "$mirror"
touch "$root/etc/kbpf-tests" # written last: a root without it is incomplete and is created again

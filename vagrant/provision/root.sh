#!/bin/sh
# A Debian 12 in a folder, with what `make` needs to begin: root.sh ROOT [MIRROR]
set -eu
root=$1 mirror=${2:-http://deb.debian.org/debian}

[ ! -e "$root/etc/kbpf-tests" ] || exit 0
rm -rf "$root"
debootstrap --variant=minbase --include=ca-certificates,make,kmod bookworm "$root" "$mirror"
touch "$root/etc/kbpf-tests" # last: a root without it is begun anew

#!/bin/sh
# Makes a guest a machine that the tests can run on, runs RESULTS/command, and leaves its exit code:
# sh guest.sh RESULTS TREE
set -eu
results=$1 tree=$2

# The shares that virtme-ng mounted without a cache are mounted anew with one.
cd /
grep ' 9p ' /proc/mounts | while read -r tag at rest; do
	case $at in / | "$results") continue ;; esac
	umount "$at"
	mount -t 9p -o ro,version=9p2000.L,trans=virtio,access=any,msize=524288,cache=loose "$tag" "$at"
done

cd "$tree"
sh vagrant/provision/kernel.sh
export RESULTS="$results"
code=0
sh "$results/command" || code=$?
echo "$code" >"$results/exit"
sync

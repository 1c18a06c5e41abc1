#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prepares a guest for the tests, runs RESULTS/command, and writes its exit code to RESULTS/exit:
# sh guest.sh RESULTS TREE
set -eu
results=$1 tree=$2

# Replace the shares that virtme-ng mounted without a cache by mounts with one.
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

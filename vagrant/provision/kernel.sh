#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prepares the running kernel for the tests: modules, bpffs, loopback. Used by the Vagrant machines and by
# the guests of `make test-kernels`.
set -eu

mountpoint -q /sys/fs/bpf || mount -t bpf -o mode=700 bpf /sys/fs/bpf
ip link set lo up
# The kernel would load these itself, but slowly under emulation.
modprobe -qa sctp udp_diag vxlan dummy tun || echo "kernel.sh: some of these modules could not be loaded" >&2

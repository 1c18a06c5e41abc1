#!/bin/sh
# Makes the running kernel one that the tests can run on: its modules, a bpffs, loopback. Vagrant's
# machines and the guests of `make test-kernels` both begin with it.
set -eu

mountpoint -q /sys/fs/bpf || mount -t bpf -o mode=700 bpf /sys/fs/bpf
ip link set lo up
# What the kernel would load by itself it loads slowly under emulation.
modprobe -qa sctp udp_diag vxlan dummy tun || echo "not all modules are there" >&2

/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* A fixed version: the bytecode must not depend on the machine that compiles it. */
#define LINUX_VERSION_CODE 331520
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + ((c) > 255 ? 255 : (c)))

/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The first file that BCC includes. BCC brings linux/bpf.h itself, under another guard: naming
 * the kernel's guard here keeps a second copy out. */
#pragma once
#define CONFIG_BPF_SYSCALL 1
#define __LINUX_BPF_H__ 1
#include <linux/types.h>

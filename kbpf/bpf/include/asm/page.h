/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
#define PAGE_SIZE 4096UL

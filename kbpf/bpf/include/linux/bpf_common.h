/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The opcode fields (class, size, mode and source) that BCC's built-in linux/bpf.h expects. */
#pragma once
#define BPF_LD 0x00
#define BPF_LDX 0x01
#define BPF_ST 0x02
#define BPF_STX 0x03
#define BPF_ALU 0x04
#define BPF_JMP 0x05
#define BPF_W 0x00
#define BPF_H 0x08
#define BPF_B 0x10
#define BPF_IMM 0x00
#define BPF_ABS 0x20
#define BPF_IND 0x40
#define BPF_MEM 0x60
#define BPF_K 0x00
#define BPF_X 0x08

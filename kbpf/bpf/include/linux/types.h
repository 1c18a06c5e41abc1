/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Kernel integer types. Byte order is in the name: __be16 and __be32 are network order. */
#pragma once
typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16, __le16, __sum16;
typedef __u32 __be32, __le32, __wsum;
typedef __u64 __be64, __le64;
typedef __s8 s8;
typedef __u8 u8;
typedef __s16 s16;
typedef __u16 u16;
typedef __s32 s32;
typedef __u32 u32;
typedef __s64 s64;
typedef __u64 u64;
typedef _Bool bool;
typedef __SIZE_TYPE__ size_t;
typedef unsigned long uintptr_t;
#define __aligned_u64 __u64 __attribute__((aligned(8)))
#define true 1
#define false 0
#define NULL ((void *)0)
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))

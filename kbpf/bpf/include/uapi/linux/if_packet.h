/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* BCC includes this file, but nothing in it is needed. */

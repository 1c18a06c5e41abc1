# SPDX-License-Identifier: Apache-2.0
"""`python -m kbpf.kernel.netfilter.dump`: what `nft list ruleset` prints, for machines without it.
`kbpf sysdump` runs it as a separate process: libnftables may end the process that uses it.
"""

import sys


def main() -> int:
    try:
        import nftables
    except ImportError as error:
        print(f"python3-nftables is missing: {error}", file=sys.stderr)
        return 1
    code, output, errors = nftables.Nftables().cmd("list ruleset")
    sys.stdout.write(output)
    sys.stderr.write(errors)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())

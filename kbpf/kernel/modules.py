"""Kernel modules."""

import shutil
import subprocess
from collections.abc import Iterable

MODPROBE_SECONDS = 60.0


def load(names: Iterable[str]) -> bool:
    """Loads those of them that are not built in; False where that cannot be tried. Whether they
    are there is for their users to find out.
    """
    modprobe = shutil.which("modprobe")
    if modprobe is None:
        return False
    for name in names:
        subprocess.run(
            [modprobe, "--quiet", "--", name],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=MODPROBE_SECONDS, check=False,
        )  # fmt: skip
    return True

"""What a process asks of the kernel for itself."""

import os
import threading
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.process import lock_folder


def test_only_one_has_the_lock_of_a_folder(tmp_path: Path) -> None:
    held = lock_folder(tmp_path, 0.0, "stop it first")
    with pytest.raises(KernelError) as error:
        lock_folder(tmp_path, 0.0, "stop it first")
    said = f"another agent is at work here ({tmp_path}): EAGAIN; stop it first"
    assert str(error.value) == said
    os.close(held)
    os.close(lock_folder(tmp_path, 0.0, ""))


def test_who_is_on_its_way_out_is_waited_for(tmp_path: Path) -> None:
    going = threading.Timer(0.2, os.close, (lock_folder(tmp_path, 0.0, ""),))
    going.start()
    os.close(lock_folder(tmp_path, 60.0, ""))
    going.join()

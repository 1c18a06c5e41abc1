# SPDX-License-Identifier: Apache-2.0
"""The end of coexistence with a previous data plane, which a failed write may delay."""

from types import SimpleNamespace

import pytest

from kbpf.dataplane.bpf.attachments import Attachments
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.model.config import Config


def test_end_of_coexistence_is_repeated_until_it_is_written(tmp_path):
    config, pins, writes = Config("me"), Pins(tmp_path), [KernelError("no memory"), None]
    attachments = Attachments(config, pins, AgentMaps(pins, config.sizes, config.packet_path))

    def end_coexistence() -> None:
        if error := writes.pop(0):
            raise error

    attachments.settings = SimpleNamespace(end_coexistence=end_coexistence)  # type: ignore
    attachments.end_coexistence()
    assert len(writes) == 2, "there was none"
    attachments.packets.coexisting = True  # as load() does
    with pytest.raises(KernelError):
        attachments.end_coexistence()
    for _ in range(2):
        attachments.end_coexistence()
    assert not writes, "and then it is not written again"

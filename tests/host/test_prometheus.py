# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus stores the same series of the page of metrics as text and as protobuf.

Debian's Prometheus 2.42 asks for protobuf if its feature `native-histograms` is on.
"""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kbpf.model.config import Config, Serving
from kbpf.serve.server import AgentServer
from tests.support.build.prometheus import prometheus
from tests.support.lab import sockets
from tests.support.lab.lab import until
from tests.values.serve.test_metrics import COUNTS, STATUS, busy

VARIES = ("process_", "scrape_", "kbpf_scrape_", "kbpf_source_last_event_", "up")
LATENCIES = "kbpf_service_connect_duration_seconds"


@contextmanager
def free_address() -> Iterator[str]:
    """An address at which a program of the block can listen, and no other process chooses to."""
    with sockets.bound(None, "127.0.0.1", 0) as reserved:
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with free_address() as address:
        config = Config(serving=Serving(healthz="", metrics=address))
        server = AgentServer(config, "bpf", lambda: COUNTS, proxy_metrics=busy())
        server.set_status(STATUS)
        server.collect()
        server.start()
        yield address
        server.stop()


@contextmanager
def scraping(target: str, address: str, folder: Path, *options: str) -> Iterator[None]:
    """Runs a Prometheus at this address that scrapes the target. A scrape that takes more than a
    second fails, and all series are gone until the next one.
    """
    configuration = folder / "prometheus.yml"
    configuration.write_text(json.dumps({
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "kbpf", "static_configs": [{"targets": [target]}]}],
    }))  # fmt: skip
    command = [
        prometheus(), f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", *options,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until("Prometheus has scraped the agent", lambda: query(address, "up == 1"))
            yield
        finally:
            process.terminate()
            process.wait()


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """The result of an instant query; [] while Prometheus does not answer."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url) as response:
            return json.load(response)["data"]["result"]
    except OSError:
        return []


def series(address: str) -> dict[frozenset[tuple[str, str]], str]:
    """The values of all series, but native histograms, and those that vary. From protobuf,
    Prometheus 2 writes the bound 1 of a bucket as ``1.0``.
    """
    return {
        frozenset(
            (name, str(float(text)) if name == "le" else text)
            for name, text in result["metric"].items()
        ): result["value"][1]
        for result in query(address, '{job="kbpf"}')
        if "value" in result and not result["metric"]["__name__"].startswith(VARIES)
    }


def test_text_and_protobuf_have_the_same_series(target: str, tmp_path: Path):
    """Prometheus does not store the classic buckets of histograms that are native."""
    folders = [tmp_path / name for name in ("text", "protobuf")]
    for folder in folders:
        folder.mkdir()
    with (
        free_address() as text,
        free_address() as protobuf,
        scraping(target, text, folders[0]),
        scraping(target, protobuf, folders[1], "--enable-feature=native-histograms"),
    ):
        expected = {
            labels: value
            for labels, value in until("it has all series", lambda: series(text)).items()
            if not dict(labels)["__name__"].startswith("kbpf_service_")
            or "_duration_seconds" not in dict(labels)["__name__"]
        }
        assert len(expected) > 200
        assert until("so has the other one", lambda: series(protobuf)) == expected

        def value_of(address: str, expression: str) -> dict[str, Any]:
            (result,) = until(expression, lambda: query(address, expression))
            return result

        quantile = value_of(protobuf, f"histogram_quantile(0.5, {LATENCIES})")
        count = value_of(protobuf, f"histogram_count({LATENCIES})")
        total = value_of(protobuf, f"histogram_sum({LATENCIES})")
        classic = value_of(text, f"histogram_quantile(0.5, {LATENCIES}_bucket)")
    assert {**count["metric"], "instance": ""} == {
        "namespace": "a", "service": "web", "port": "http", "protocol": "TCP", "job": "kbpf",
        "instance": "",
    }  # fmt: skip
    assert (count["value"][1], total["value"][1]) == ("3", "70.5")
    # two values in the bucket from 2^-16 to 2^-15 s, one above 64 s
    assert 2.0**-16 < float(quantile["value"][1]) <= 2.0**-15
    assert 2.0**-16 < float(classic["value"][1]) <= 2.0**-15

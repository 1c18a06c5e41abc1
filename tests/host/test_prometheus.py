# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus (Debian's 2.42) stores the series of the page of metrics."""

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
from tests.support.prometheus import parse
from tests.values.serve.test_metrics import COUNTS, STATUS, busy

CONFIGURATION = """
global: {scrape_interval: 1s}
scrape_configs: [{job_name: kbpf, static_configs: [{targets: ["%s"]}]}]
"""
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
def scraping(target: str, address: str, folder: Path) -> Iterator[None]:
    """Runs a Prometheus at this address that scrapes the target. A scrape that takes more than a
    second fails, and all series are gone until the next one.
    """
    configuration = folder / "prometheus.yml"
    configuration.write_text(CONFIGURATION % target)
    command = [
        prometheus(),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=native-histograms",  # so it asks for protobuf first
    ]
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


def test_all_series_are_stored(target: str, tmp_path):
    with urllib.request.urlopen(f"http://{target}/metrics") as page:
        samples = sum(len(family.samples) for family in parse(page.read().decode()).values())
    with free_address() as address, scraping(target, address, tmp_path):

        def value_of(expression: str) -> float:
            (result,) = until(expression, lambda: query(address, expression))
            return float(result["value"][1])

        assert value_of("scrape_samples_scraped") == samples > 200
        # two values in the bucket from 2^-16 to 2^-15 s, one above 64 s
        assert 2.0**-16 < value_of(f"histogram_quantile(0.5, {LATENCIES}_bucket)") <= 2.0**-15

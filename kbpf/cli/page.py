# SPDX-License-Identifier: Apache-2.0
"""`kbpf page`: the state of this node as one HTML page, for a person with a browser."""

import sys
import time

from kbpf.cli.options import DEFAULT, ConfigFile, PinDir, StateDir


def page(config: ConfigFile = None, pin_dir: PinDir = DEFAULT.pin_dir, state_dir: StateDir = DEFAULT.state_dir) -> None:
    """Print the state of this node as an HTML page: Services, backends, failed connections, maps.
    The page needs no other file.
    """
    from kbpf.dataplane import reader as dataplane
    from kbpf.views import html_page

    locations = dataplane.Locations.of_settings(pin_dir, state_dir)
    inspection = dataplane.read(locations, html_page.NEEDS)
    text = html_page.format_html(inspection, time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    sys.stdout.write(text.encode("ascii", "xmlcharrefreplace").decode())

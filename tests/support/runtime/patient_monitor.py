# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.runtime.patient_monitor monitor|top ...`: kbpf that the programs of a
busy machine do not forget while it is stopped.
"""

from kbpf.cli import app
from tests.support.lab.events import patient

if __name__ == "__main__":
    with patient():
        app.main()

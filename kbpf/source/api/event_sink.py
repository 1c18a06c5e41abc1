# SPDX-License-Identifier: Apache-2.0
"""Posts the agent's Events to the API server."""

from kbpf.source.api.credentials import Cluster
from kbpf.source.api.transport import ApiConnection


class EventSink:
    """A connection that is opened on first use. One thread posts; any thread may call close()."""

    def __init__(self, cluster: Cluster) -> None:
        self._connection = ApiConnection(cluster)

    def post(self, path: str, body: bytes) -> int:
        """Posts this JSON and returns the HTTP status. Raises SourceError."""
        response = self._connection.request(path, method="POST", body=body)
        response.read_error_body()
        return response.status

    def close(self) -> None:
        """Aborts the current request; post() fails from now on."""
        self._connection.close()

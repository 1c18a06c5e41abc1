"""Sends an object to the API server: the agent's Events, and nothing else."""

from kbpf.source.api.credentials import Cluster
from kbpf.source.api.transport import ApiConnection


class EventSink:
    """One connection, opened when there is something to say. One thread posts; any may close()."""

    def __init__(self, cluster: Cluster) -> None:
        self._connection = ApiConnection(cluster)

    def post(self, path: str, body: bytes) -> int:
        """The status of the answer to a POST of this JSON. Raises SourceError."""
        response = self._connection.request(path, method="POST", body=body)
        response.read_error_body()
        return response.status

    def close(self) -> None:
        """Ends whatever it waits for; nothing is sent afterwards."""
        self._connection.close()

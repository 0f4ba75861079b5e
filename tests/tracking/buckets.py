"""Servers of buckets on this machine, and a network that fails between them and a test."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock
from urllib.parse import urlsplit

from tests.program import free_address

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
# Without these, gcsfs looks for an account before every request, to ask what kind of bucket it is.
NO_ACCOUNT = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}


@contextmanager
def bucket_server(scheme: str) -> Iterator[str]:
    """Runs a server with an empty bucket, which the libraries find; yields the address of the server."""
    if scheme == "s3":
        from boto3 import client
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
    else:
        from gcp_storage_emulator.server import create_server

        host, _, port = free_address().partition(":")
        server = create_server(host, int(port), in_memory=True, default_bucket="bucket")
        server.start()
    try:
        with reached_at(scheme, url := f"http://{host}:{port}"):
            if scheme == "s3":
                client("s3").create_bucket(Bucket="bucket")
            yield url
    finally:  # Its thread would keep the process of the tests.
        server.stop()


@contextmanager
def reached_at(scheme: str, url: str) -> Iterator[None]:
    names = {"AWS_ENDPOINT_URL": url, **KEYS} if scheme == "s3" else {"STORAGE_EMULATOR_HOST": url, **NO_ACCOUNT}
    with mock.patch.dict(os.environ, names):
        yield


class Network:
    """A proxy in front of a server, which cuts connections."""

    def __init__(self, url: str, seed: int = 0):
        self._target = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._random, self.fault_rate, self.num_cuts = random.Random(seed), 0.0, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if self._random.random() < self.fault_rate:
                    self.num_cuts += 1
                    break
                target.sendall(data)
        # The other direction waits in another thread, which closing alone would not wake.
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        self._listener.close()

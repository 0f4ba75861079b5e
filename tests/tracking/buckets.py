"""Runs local servers of buckets, and a network with faults between them and a test."""

import json
import os
import random
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tests.program import free_address

RESETS = struct.pack("ii", 1, 0)
"""Socket option with which closing resets the connection."""

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
    finally:  # Its thread would keep the test process alive.
        server.stop()


@contextmanager
def reader_of(url: str, *more: str) -> Iterator[None]:
    """Makes the libraries use an account that may read the buckets of an S3 server and take the actions `more`."""
    from boto3 import client

    actions = ["s3:ListBucket", "s3:GetObject", *more]
    iam, allowed = client("iam"), {"Effect": "Allow", "Action": actions, "Resource": "*"}
    name = uuid.uuid4().hex  # All servers of a process have the same accounts.
    iam.create_user(UserName=name)
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=name, PolicyName="read", PolicyDocument=policy)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    names = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    # From now on, moto checks what an account may do.
    before = _count_unchecked(url, "0")
    try:
        with mock.patch.dict(os.environ, names):
            yield
    finally:
        _count_unchecked(url, before)


def _count_unchecked(url: str, count: str) -> str:
    """Sets how many requests are not checked, and returns the number before."""
    request = Request(f"{url}/moto-api/reset-auth", count.encode(), {"Content-Type": "text/plain"})
    with urlopen(request) as answer:
        return json.load(answer)["PREVIOUS_INITIAL_NO_AUTH_ACTION_COUNT"]


@contextmanager
def reached_at(scheme: str, url: str) -> Iterator[None]:
    names = {"AWS_ENDPOINT_URL": url, **KEYS} if scheme == "s3" else {"STORAGE_EMULATOR_HOST": url, **NO_ACCOUNT}
    with mock.patch.dict(os.environ, names):
        yield


class Network:
    """A proxy in front of a server, which delays what is sent, and cuts and resets connections."""

    def __init__(self, url: str, seed: int = 0):
        self._target = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._random, self.fault_rate, self.num_faults = random.Random(seed), 0.0, 0
        self.is_stalled, self.num_stalls = False, 0
        """Whether connections pass nothing on any more, without an end."""
        self.delay_s = 0.0
        """Longest delay of 16 KiB."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        way = socket.SHUT_RDWR
        with suppress(OSError):
            while data := source.recv(1 << 14):
                time.sleep(self.delay_s * self._random.random() * len(data) / (1 << 14))
                if self.is_stalled:
                    self.num_stalls += 1
                    source.recv(1 << 14, socket.MSG_WAITALL)  # Until the client gives up.
                    break
                if self._random.random() < self.fault_rate:
                    self.num_faults += 1
                    if self._random.random() < 0.5:
                        way = socket.SHUT_RD
                        for end in (source, target):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
                    break
                target.sendall(data)
        # The other direction waits in another thread, which closing alone would not wake.
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(way)
        source.close()

    def close(self) -> None:
        self._listener.close()

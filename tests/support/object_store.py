"""A local S3 server (`moto`) with one bucket."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


class S3:
    """A running server with one bucket, `bucket`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Starts the server with an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(self.endpoint, timeout=60).close()
                break
            except urllib.error.URLError:
                assert self.server.poll() is None, "the server ended"
                time.sleep(0.1)
        self.put("bucket")

    def stop(self) -> None:
        self.server.kill()
        self.server.wait()

    def put(self, key: str, data: bytes = b"") -> None:
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self.endpoint}/{key}", data=data, method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=60).close()

    def replace(self, key: str, new: str) -> None:
        """Overwrites an object with the owner's credentials."""
        program = "import boto3, sys; boto3.client('s3').put_object(Bucket='bucket', Key=sys.argv[1], Body=sys.argv[2])"
        subprocess.run([sys.executable, "-c", program, key, new], check=True)

    def upload(self, folder: Path, prefix: str) -> str:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"bucket/{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://bucket/{prefix}"


def use(store: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `s3://` refer to the server in this process and its children."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELECTRA_FAST_RETRY_SECONDS", "3")


@contextlib.contextmanager
def running() -> Iterator[S3]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = S3(port)
    try:
        store.start()
        yield store
    finally:
        store.stop()

"""Objects written to, read from and removed from a local S3 server."""

import os
import signal
import subprocess
import sys
import urllib.request

import object_store
import pytest

from electra_fast._data import delete_objects, download, list_objects, upload
from electra_fast.errors import InputError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def credentials(s3, monkeypatch):
    object_store.use(s3, monkeypatch)


@pytest.mark.parametrize("size", [0, 1000, (16 << 20) + 1, 25_000_000])
def test_uploaded_file_is_downloaded_unchanged(size, tmp_path):
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    assert upload(str(tmp_path / "a"), f"s3://bucket/{size}/deep/a%20%C3%BC.bin")
    assert list_objects(f"s3://bucket/{size}") == [("deep/a ü.bin", size)]
    download(f"s3://bucket/{size}/deep/a%20%C3%BC.bin", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == data
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "a").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_objects_are_replaced_created_and_deleted(tmp_path):
    (tmp_path / "a").write_text("ours")
    (tmp_path / "b").write_text("another")
    assert upload(str(tmp_path / "a"), "s3://bucket/x/1", if_absent=True)
    assert not upload(str(tmp_path / "b"), "s3://bucket/x/1", if_absent=True)
    assert upload(str(tmp_path / "b"), "s3://bucket/x/2")
    assert upload(str(tmp_path / "a"), "s3://bucket/x/2")
    assert list_objects("s3://bucket/x/") == [("1", 4), ("2", 4)]
    delete_objects("s3://bucket/x", ["2", "absent"])
    assert list_objects("s3://bucket/x") == [("1", 4)]
    assert list_objects("s3://bucket/nothing") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/x", "https://host/x: web servers are read-only; pass an s3://"),
        ("s3://absent/x", "s3://absent/x: not found; check the URL, the bucket and the region"),
        ("s3://key:secret@bucket/x", "remove it"),
        ("/tmp/x", "/tmp/x: not a URL"),
    ],
)
def test_unwritable_url_is_one_line(url, message, tmp_path):
    (tmp_path / "a").write_text("x")
    for if_absent in (False, True):
        with pytest.raises((InputError, FileNotFoundError), match=message) as error:
            upload(str(tmp_path / "a"), url, if_absent)
        assert "\n" not in str(error.value)


def test_missing_object_leaves_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="s3://bucket/absent: not found"):
        download("s3://bucket/absent", str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match="absent"):
        upload(str(tmp_path / "absent"), "s3://bucket/x")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_an_upload_without_leftover_parts(s3, tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(4 << 30)
    program = "import sys; from electra_fast._data import upload; print(flush=True); upload(*sys.argv[1:])"
    command = [sys.executable, "-c", program, str(tmp_path / "large"), "s3://bucket/large"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout and running.stdout.readline() == "\n"
    uploads = f"{s3.endpoint}/bucket?uploads"
    while b"<UploadId>" not in urllib.request.urlopen(uploads, timeout=60).read():
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in running.communicate(timeout=60)[1]
    assert b"<UploadId>" not in urllib.request.urlopen(uploads, timeout=60).read()
    assert list_objects("s3://bucket/large") == []

"""Huge files read in parts, small ones as ever; leases on the output folder between processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from electra_fast import _data
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.prepare import prepare

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(500))]


@pytest.fixture
def vocab(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCAB))
    return path


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def prepare_parts(inputs, vocab, out, part_bytes, **options):
    arguments = {"text_fields": ["text"], "_part_bytes": part_bytes, **options}
    return _data.prepare(_data.Tokenizer(str(vocab)), str(out), files=[str(inputs)], **arguments)


def test_small_files_give_the_same_bytes_as_ever(vocab, tmp_path):
    """The values are those of the release before there were parts, lanes and leases."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        documents = "\n\n".join(f"w{number} w{n}\nw{n % 7}" for n in range(100))
        (tmp_path / f"in/{number}.txt").write_text(documents + "\n" * (4 << 20))
    lines = "".join(json.dumps({"text": f"w{n}"}) + "\n" for n in range(50))
    (tmp_path / "in/z.jsonl").write_text(lines)
    prepare([tmp_path / "in"], vocab=vocab, out=tmp_path / "out", holdout=0.1, progress=False)
    found = manifest(tmp_path / "out")
    assert found["job"] == "11d098fd67fc233620188a088eed0f01"
    assert found["content_hash"] == "05584862e51ee2bd984080ba09292a5b"
    assert found["checksum"] == "2eb678879adb7c583a92e6f77c28ff09"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_parts_hold_the_same_documents(vocab, tmp_path, name):
    documents = [f"w{n} w{n + 1}\nw{n % 7}" for n in range(400)]
    text = "\n\n".join(documents) if name == "a.txt" else "".join(json.dumps({"text": d}) + "\n" for d in documents)
    (tmp_path / name).write_text(text)
    prepare_parts(tmp_path / name, vocab, tmp_path / "whole", None)
    whole, jobs = [ids.tolist() for ids in Corpus(tmp_path / "whole")], {manifest(tmp_path / "whole")["job"]}
    for part_bytes in (100, 1000, 4321):
        out = tmp_path / str(part_bytes)
        progress = []
        report = prepare_parts(
            tmp_path / name, vocab, out, part_bytes, progress=lambda *values, p=progress: p.append(values)
        )
        assert report["num_input_groups"] == -(-len(text.encode()) // part_bytes)
        assert [ids.tolist() for ids in Corpus(out)] == whole and verify(out)
        assert progress[-1][:2] == (len(text.encode()), len(text.encode()))
        jobs.add(manifest(out)["job"])
    assert len(jobs) == 4, "the size of the parts is part of the job"


def test_partitions_share_the_parts_of_a_file(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{n}" for n in range(500)))
    reports = [prepare_parts(tmp_path / "a.txt", vocab, tmp_path / "out", 300, partition=(i, 3)) for i in (1, 2, 3)]
    assert [report["complete"] for report in reports] == [False, False, True]
    whole = prepare_parts(tmp_path / "a.txt", vocab, tmp_path / "whole", 300)
    assert reports[-1]["content_hash"] == whole["content_hash"]


WAITING = """
import sys
sys.path[:0] = sys.argv[3].split(":")
from electra_fast import _data

def documents():
    yield "w1"
    print("reading", flush=True)
    sys.stdin.read()

_data.prepare(_data.Tokenizer(sys.argv[1]), sys.argv[2], texts=documents(), text_fields=["text"])
"""


def test_a_killed_run_frees_the_folder_at_once(vocab, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", WAITING, vocab, out, ":".join(sys.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        taken = rf"another prepare is running in this folder \(process {process.pid} on {socket.gethostname()}\)"
        with pytest.raises(ValueError, match=taken):
            prepare(iter(["w2"]), vocab=vocab, out=out, progress=False)
        process.kill()
    assert (out / ".lock-all").exists()
    assert prepare(iter(["w2"]), vocab=vocab, out=out, progress=False).complete
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_a_lease_of_another_host_is_free_after_a_minute(vocab, tmp_path):
    out, lease = tmp_path / "out", tmp_path / "out/.lock-1-of-2"
    out.mkdir()
    holder = {"host": "elsewhere", "machine": "0" * 16, "pid": 7, "started": 1, "nonce": 2}
    lease.write_text(json.dumps(holder))
    with pytest.raises(ValueError, match=r"\(process 7 on elsewhere\)"):
        prepare(iter(["w2"]), vocab=vocab, out=out, progress=False)
    os.utime(lease, (time.time() - 70,) * 2)
    assert prepare(iter(["w2"]), vocab=vocab, out=out, progress=False).complete


def test_a_stopped_run_on_this_host_keeps_its_folder(vocab, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", WAITING, vocab, out, ":".join(sys.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.utime(out / ".lock-all", (time.time() - 1000,) * 2)
        try:
            with pytest.raises(ValueError, match=f"process {process.pid} on"):
                prepare(iter(["w2"]), vocab=vocab, out=out, progress=False)
        finally:
            process.kill()

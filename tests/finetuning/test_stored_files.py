"""Labeled examples at URLs are read like files on disk, and messages have their URL."""

import json
import re

import object_store
import pytest
from in_process import run
from tiny_task import QUICK, save_encoder, sentences

import electra_fast as ef
from electra_fast.errors import InputError


@pytest.mark.slow
def test_bucket_and_disk_give_equal_results(tmp_path, tiny_vocab, monkeypatch):
    for name in ("train", "dev", "test"):
        lines = (f"{text}\t{'good' if label else 'bad'}\n" for text, label in sentences(30, len(name)))
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + "".join(lines))
    (tmp_path / "bad.tsv").write_text("text\tlabel\nthe\tgood\tx\n")
    model = save_encoder(tmp_path / "encoder", tiny_vocab)
    with object_store.running() as s3:
        object_store.use(s3, monkeypatch)
        url = s3.upload(tmp_path, "examples")
        results = {}
        for name, folder in (("disk", str(tmp_path)), ("bucket", url)):
            files = {split: f"{folder}/{split}.tsv" for split in ("train", "dev", "test")}
            result = ef.finetune(model, task="classification", out=tmp_path / name, seeds=1, overrides=QUICK, **files)
            results[name] = re.sub(r'"seconds": [\d.]+', "", result.to_json())
        assert results["bucket"] == results["disk"].replace(str(tmp_path), url)
        trained = tmp_path / "bucket/classification/seed-0/model"
        runs = [run("predict", trained, f"{folder}/test.tsv") for folder in (tmp_path, url)]
        assert runs[0].stdout == runs[1].stdout != "" and f"{url}/test.tsv: 30 predictions" in runs[1].stderr
        runs = [run("evaluate", trained, f"{folder}/test.tsv", "--json") for folder in (tmp_path, url)]
        assert json.loads(runs[0].stdout)["scores"] == json.loads(runs[1].stdout)["scores"]
        with pytest.raises(InputError, match=rf"{url}/bad\.tsv: line 2"):
            ef.finetune(model, task="classification", train=f"{url}/bad.tsv", out=tmp_path / "x")
        with pytest.raises(FileNotFoundError, match=f"{url}/absent.tsv: not found"):
            ef.finetune(model, task="classification", train=f"{url}/absent.tsv", out=tmp_path / "x")
    texts = [path for path in (tmp_path / "bucket").rglob("*") if path.suffix in (".json", ".md", ".toml", ".jsonl")]
    assert texts and not any("/tmp/tmp" in path.read_text() for path in texts)

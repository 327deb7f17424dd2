"""A run's mirror in a local S3 server: resuming from it is bitwise exact, and it never delays training."""

import contextlib
import os
import shutil
import signal
import threading

import object_store
import pytest
import tiny_run
import torch
from in_process import run as electra_fast
from tiny_run import STEPS, assert_same_run, tiny_config
from transformers import AutoModel

import electra_fast as ef
from electra_fast._data import delete_objects, download, list_objects, upload
from electra_fast.errors import InputError, Interrupted, StopTraining
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.huggingface.folder import write_model
from electra_fast.training import mirror
from electra_fast.training.checkpoint_writer import CheckpointWriter

pytestmark = pytest.mark.slow


@pytest.fixture
def url(s3, monkeypatch, tmp_path):
    """The URL of a test's mirror."""
    object_store.use(s3, monkeypatch)
    monkeypatch.setenv("ELECTRA_FAST_RETRY_SECONDS", "1")
    return f"s3://bucket/{tmp_path.name}/run"


def train(corpus, out, url, stop_at=None, **options):
    """Trains `tiny_run` with a mirror, to the step after `stop_at` or to the end; returns the step."""

    def stop(record):
        if record["step"] == stop_at:
            raise StopTraining("enough")

    changes = {name: options.pop(name) for name in list(options) if "." in name}
    config = tiny_config(**{"train.mirror": url}, **changes)
    try:
        return ef.pretrain(corpus, config=config, out=out, on_log=stop, **options).step
    except StopTraining:
        return checkpoint_folder.steps(out)[-1]


def mirrored(url):
    """Returns the steps of the complete checkpoints in a mirror."""
    return sorted(step for step, names in mirror._checkpoints(url).items() if "state.json" in names)


def fetch(url, folder):
    """Copies a mirror into a folder."""
    for name, _ in list_objects(url):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        download(f"{url}/{name}", str(folder / name))
    return folder


def test_resume_on_empty_machine_is_bitwise_equal(whole_run, validation_corpus, tmp_path, url, capsys):
    assert train(validation_corpus, tmp_path / "run", url, stop_at=4) == 5
    shutil.rmtree(tmp_path / "run")
    arguments = (validation_corpus, "--out", tmp_path / "run", "--train.mirror", url)
    process = electra_fast("pretrain", *arguments)  # the mirror has the configuration
    assert process.returncode == 0 and f"{url}: downloaded step-5\n" in process.stderr, process.stderr
    assert_same_run(tmp_path / "run", whole_run)
    assert len(mirrored(url)) == 2 and mirrored(url)[-1] == STEPS and not (tmp_path / "run/.mirror").exists()
    copy = fetch(url, tmp_path / "copy")
    for step in mirrored(url):
        checkpoint_folder.verify(checkpoint_folder.path_of(copy, step))
    for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl", "environment.jsonl", "curves.png", "mirror.json"):
        assert (copy / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert sorted(path.name for path in (copy / "tokenizer").iterdir()) == sorted(
        path.name for path in (tmp_path / "run/tokenizer").iterdir()
    )
    ef.export(tmp_path / "run", out=tmp_path / "export")  # the tokenizer is there too


def test_damaged_and_incomplete_checkpoints_skipped(whole_run, validation_corpus, tmp_path, url, capsys):
    train(validation_corpus, tmp_path / "run", url, stop_at=8)
    earlier, last = mirrored(url)
    assert last == 9
    (tmp_path / "bad").write_bytes(b"not these")
    upload(str(tmp_path / "bad"), f"{url}/checkpoints/step-9/model.safetensors")
    upload(str(tmp_path / "bad"), f"{url}/checkpoints/step-10/model.safetensors")
    shutil.rmtree(tmp_path / "run")
    train(validation_corpus, tmp_path / "run", url)
    stderr = capsys.readouterr().err
    assert f"warning: {url}/checkpoints/step-10: incomplete; not used" in stderr
    damaged = "model.safetensors: damaged (its checksum does not match); not used"
    assert f"warning: {url}/checkpoints/step-9/{damaged}" in stderr
    assert f"{url}: downloaded step-{earlier}\n" in stderr
    assert_same_run(tmp_path / "run", whole_run)
    steps = mirrored(url)
    assert steps == sorted(mirror._checkpoints(url)) and steps[-1] == STEPS
    for step in steps:
        delete_objects(f"{url}/checkpoints/step-{step}", ["model.safetensors"])
    with pytest.raises(InputError, match=r"no intact checkpoint: .*model.safetensors: missing; choose another"):
        train(validation_corpus, tmp_path / "other", url)  # no new run starts
    assert mirrored(url) == steps


def test_newer_side_wins(whole_run, validation_corpus, tmp_path, url, capsys):
    train(validation_corpus, tmp_path / "run", url, stop_at=8)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    train(validation_corpus, tmp_path / "run", url, stop_at=16)
    shutil.copytree(tmp_path / "old", tmp_path / "older")
    capsys.readouterr()
    assert train(validation_corpus, tmp_path / "old", url) == STEPS
    assert f"{url}: downloaded step-17; {tmp_path / 'old'} ended at step 9\n" in capsys.readouterr().err
    assert_same_run(tmp_path / "old", whole_run)
    assert train(validation_corpus, tmp_path / "run", "") == STEPS  # without the mirror
    train(validation_corpus, tmp_path / "run", url)
    assert "downloaded" not in capsys.readouterr().err
    train(validation_corpus, tmp_path / "older", url, from_step=6, stop_at=12)
    assert mirrored(url)[-1] == 13  # later checkpoints of the earlier session are gone


def test_mirror_of_another_run_refused(validation_corpus, tmp_path, url):
    train(validation_corpus, tmp_path / "run", url, stop_at=4)
    train(validation_corpus, tmp_path / "other", "", stop_at=4)
    before = list_objects(url)
    with pytest.raises(InputError, match=f"{url}: the mirror of a run other than .*other; choose another"):
        train(validation_corpus, tmp_path / "other", url)
    with pytest.raises(InputError, match=r"train.seed = 1, but this run was started with 0"):
        train(validation_corpus, tmp_path / "third", url, **{"train.seed": "1"})
    with pytest.raises(InputError, match=r"contains run/.* but no mirror of a run; choose an empty prefix"):
        train(validation_corpus, tmp_path / "fourth", url.removesuffix("/run"))
    assert list_objects(url) == before
    shutil.rmtree(tmp_path / "other")
    mirror.replace_file(tmp_path / "mirror.json", "")
    upload(str(tmp_path / "mirror.json"), f"{url}/mirror.json")
    with pytest.raises(InputError, match=r"mirror.json: has no id of a run"):
        train(validation_corpus, tmp_path / "other", url)


def test_superseded_session_stops_copying(validation_corpus, tmp_path, url, capsys):
    def take_over(event):
        if event["step"] == 6:
            shutil.copytree(tmp_path / "run", tmp_path / "later", ignore=shutil.ignore_patterns(".mirror"))
            mirror.claim(tmp_path / "later", url, None)

    train(validation_corpus, tmp_path / "run", url, on_checkpoint=take_over)
    assert capsys.readouterr().err.count("mirror.json is missing or names another session") == 1
    assert mirrored(url)[-1] <= 6


@contextlib.contextmanager
def mirroring(run, url):
    """Yields a run's mirror, and a function that saves the checkpoint of a step."""
    (run / "tokenizer").mkdir(parents=True)
    mirror.claim(run, url, None)
    x = {"x": torch.ones(8)}
    with mirror.Mirror(run, url, keep=1) as copies, CheckpointWriter(run, 1, copies) as writer:

        def save(step, best=None):
            writer.save(tiny_config(), x, x, TrainState(step=step, best_step=best))
            assert writer.wait_up_to(60)

        yield copies, save


def test_training_never_waits_for_copies(tmp_path, url, monkeypatch):
    reached = threading.Event()
    go = threading.Event()
    copied = []
    upload_folder = mirror.upload_folder

    def upload_later(folder, place, last):
        if place.startswith(f"{url}/checkpoints"):
            reached.set()
            assert go.wait(60)
            checkpoint_folder.verify(folder)
            copied.append(folder.name)
        upload_folder(folder, place, last)

    monkeypatch.setattr(mirror, "upload_folder", upload_later)
    run = tmp_path / "run"
    with mirroring(run, url) as (copies, save):
        for step in (1, 2, 3):
            save(step)
            assert reached.wait(60)
        assert checkpoint_folder.steps(run) == [3] and not copied and not copies.wait_up_to(0)
        go.set()
        assert copies.wait_up_to(60) and copied == ["step-1", "step-3"]  # step 2 was replaced while it waited
    assert mirrored(url) == [3] and not copies.problems


def test_newest_and_best_checkpoints_mirrored(tmp_path, url):
    run = tmp_path / "run"
    steps = []
    with mirroring(run, url) as (copies, save):
        for step, best in ((1, 1), (2, 1), (3, 1), (4, 4)):
            save(step, best)
            assert copies.wait_up_to(60)
            steps.append(mirrored(url))
            assert steps[-1] == checkpoint_folder.steps(run)
            mirror.restore(tmp_path / f"copy-{step}", url, goes_back=False)
            assert checkpoint_folder.steps(tmp_path / f"copy-{step}") == steps[-1]
    assert steps == [[1], [1, 2], [1, 3], [4]]


@pytest.mark.parametrize("place", ["s3://no-such-bucket/run", "runs/here"])
def test_invalid_url_refused_before_training(validation_corpus, tmp_path, url, place):
    process = electra_fast(*tiny_run.command(validation_corpus, tmp_path / "run", **{"train.mirror": place})[3:])
    assert process.returncode == 2 and place in process.stderr and process.stderr.count("\n") == 1, process.stderr
    assert not checkpoint_folder.steps(tmp_path / "run")


def test_outage_is_retried_with_next_copy(whole_run, validation_corpus, tmp_path, url, capsys):
    with object_store.running() as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        patch.setenv("ELECTRA_FAST_RETRY_SECONDS", "0")
        saved = []
        has_failed = threading.Event()
        fail = mirror.Mirror._fail
        patch.setattr(mirror.Mirror, "_fail", lambda *arguments: (fail(*arguments), has_failed.set()))

        def fail_for_a_while(event):
            if event["step"] == 6:
                objects = {name: (fetch(url, tmp_path / "saved") / name).read_bytes() for name, _ in list_objects(url)}
                saved.extend(objects.items())
                store.stop()
            if event["step"] == 18:
                assert has_failed.wait(60)
                store.start()
                for name, content in saved:
                    store.put(f"{url.removeprefix('s3://')}/{name}", content)

        assert train(validation_corpus, tmp_path / "run", url, on_checkpoint=fail_for_a_while) == STEPS
        assert mirrored(url)[-1] == STEPS
    assert f"warning: {url}: step-" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", whole_run)


def test_dead_store_does_not_end_run(whole_run, validation_corpus, tmp_path, url, capsys):
    with object_store.running() as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", store.endpoint)

        def die(event):
            if event["step"] == 6:
                store.stop()

        assert train(validation_corpus, tmp_path / "run", url, on_checkpoint=die) == STEPS
    *_, last = (line for line in capsys.readouterr().err.splitlines() if url in line)
    assert f"step {STEPS}: warning: {url}: step-{STEPS} is not mirrored: " in last
    assert_same_run(tmp_path / "run", whole_run)
    assert not (tmp_path / "run/.mirror").exists()


def test_signal_mirrors_newest_checkpoint(whole_run, validation_corpus, tmp_path, url):
    def interrupt(record):
        if record["step"] == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    config = tiny_config(**{"train.mirror": url})
    with pytest.raises(Interrupted):
        ef.pretrain(validation_corpus, config=config, out=tmp_path / "run", on_log=interrupt)
    assert mirrored(url)[-1] == checkpoint_folder.steps(tmp_path / "run")[-1] >= 8
    shutil.rmtree(tmp_path / "run")
    train(validation_corpus, tmp_path / "run", url)
    assert_same_run(tmp_path / "run", whole_run)


def test_ranks_resume_from_mirror(server, exact_run, validation_corpus, tmp_path, url):
    options = tiny_run.EXACT | {"train.mirror": url}
    train(validation_corpus, tmp_path / "run", url, stop_at=8, **tiny_run.EXACT)
    shutil.rmtree(tmp_path / "run")
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "ELECTRA_FAST_RETRY"))}
    outputs = server.run(2, validation_corpus, tmp_path / "run", environment, **options)
    assert f"{url}: downloaded step-9" in outputs[0] and "downloaded" not in outputs[1]
    assert mirrored(url)[-1] == STEPS
    assert all(map(torch.equal, tiny_run.weights(tmp_path / "run").values(), tiny_run.weights(exact_run).values()))


def test_export_to_store_loads_after_download(whole_run, tmp_path, url):
    done = electra_fast("export", whole_run, "--out", url)
    assert done.returncode == 0 and f"{url}: discriminator, encoder, generator load with" in done.stdout, done.stderr
    ef.export(whole_run, out=tmp_path / "local")
    copy = fetch(url, tmp_path / "copy")
    assert sorted(path.name for path in copy.iterdir()) == ["discriminator", "encoder", "generator"]
    for name, _ in list_objects(url):
        assert (copy / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    AutoModel.from_pretrained(copy / "encoder")
    upload(str(copy / "encoder/config.json"), f"{url}/generator/added_tokens.json")
    delete_objects(url, ["encoder/config.json"])  # as if the upload had been interrupted
    assert ef.export(whole_run, out=url).out == url  # replaces the remains of an earlier export
    assert [name for name, _ in list_objects(url)] == sorted(str(path.relative_to(copy)) for path in copy.rglob("*.*"))
    for name, message in {
        "encoder/notes": "encoder/notes does not belong to the earlier",
        "notes": "not empty and not",
    }.items():
        upload(str(copy / "encoder/config.json"), f"{url}/{name}")
        with pytest.raises(InputError, match=f"{url}: {message}"):
            ef.export(whole_run, out=url)
        assert name in dict(list_objects(url))


def test_failed_upload_keeps_export(whole_run, tmp_path, url, monkeypatch):
    made = []

    def write(*arguments, **options):
        made.append(write_model(*arguments, **options))
        if len(made) == 3:
            store.stop()

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with object_store.running() as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setattr("electra_fast.huggingface.export.write_model", write)
        with pytest.raises(OSError, match=rf"{url}: not written: .*; copy the export from {tmp_path}") as caught:
            ef.export(whole_run, out=url)
    (export_folder,) = tmp_path.glob("electra-fast-export-*/export")
    assert str(export_folder) in str(caught.value) and AutoModel.from_pretrained(export_folder / "encoder")

"""Leftovers of a kill or a full disk do not block a new run, and a failed removal of old files is never fatal."""

import errno
import os
import shutil

import pytest
from in_process import run
from prepare_programs import contents
from test_checkpoint import save
from tiny_run import tiny_config

from electra_fast.data.mixture import Mixture
from electra_fast.errors import InputError
from electra_fast.files import atomic_files, checkpoint_folder
from electra_fast.huggingface.export import import_
from electra_fast.training.run import exclusive, open_run

SMALL = ("--preset", "tiny", "--train.steps", 1, "--train.batch_size", 4, "--train.log_every", 1)


def begin(corpus, out):
    """The steps of `pretrain` before it trains."""
    config = tiny_config(**{"data.corpus": str(corpus), "train.out": str(out)})
    with exclusive(out):
        return open_run(config, Mixture(config.data.corpus))


@pytest.fixture(scope="module")
def new_run(validation_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("new") / "run"
    begin(validation_corpus, out)
    return out


def hide(path):
    path.rename(path.with_name(f".{path.name}.writing"))


# Leftovers of a new run, each with the files to remove.
LEFTOVERS = {
    "a lock": lambda out: [shutil.rmtree(out / "tokenizer"), (out / "config.toml").unlink()],
    "a temporary file": lambda out: [shutil.rmtree(out / "tokenizer"), hide(out / "config.toml")],
    "no tokenizer": lambda out: shutil.rmtree(out / "tokenizer"),
    "an empty folder": lambda out: [shutil.rmtree(out), (out / "checkpoints/.step-3.writing").mkdir(parents=True)],
}  # fmt: skip


@pytest.mark.parametrize("name", LEFTOVERS)
def test_run_starts_in_folder_of_unstarted_run(new_run, validation_corpus, tmp_path, name):
    out = shutil.copytree(new_run, tmp_path / "run")
    LEFTOVERS[name](out)
    assert begin(validation_corpus, out).state is None
    files = contents(out)
    expected = contents(new_run)
    assert files.pop("config.toml") == expected.pop("config.toml").replace(bytes(new_run), bytes(out))
    assert files.items() >= expected.items()


@pytest.mark.parametrize("name", [".notes", "tokenizer/vocab.txt", "checkpoints/x"])
def test_foreign_files_are_refused_and_kept(validation_corpus, tmp_path, name):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(InputError, match=f"run: contains {name.split('/')[0]} but no run .config"):
        begin(validation_corpus, tmp_path / "run")
    assert mine.read_text() == "mine"


def test_full_disk_is_reported_and_new_run_starts_afterwards(validation_corpus, tmp_path, monkeypatch):
    """Errors of `write` and `fsync` have no path. Each call fails once, until a run succeeds."""
    out = tmp_path / "run"
    corpus = tmp_path / "corpus"
    shutil.copytree(validation_corpus, corpus)
    original = os.fsync
    num_refused = 0

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(1, 9):
        calls = iter(range(1, 1000))
        monkeypatch.setattr(os, "fsync", lambda file, at=number, n=calls: full() if next(n) == at else original(file))
        done = run("pretrain", corpus, *SMALL, "--out", out)
        if done.returncode == 0:
            break
        num_refused += 1
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert f"error: {out}/" in line and "No space left on device; " in line, line
        assert "free some space there, or choose another disk, and run the same command again" in line
    assert num_refused > 3


def test_import_replaces_leftovers_of_unstarted_run(whole_run, tmp_path):
    run("export", whole_run, "--out", tmp_path / "export")
    with exclusive(tmp_path / "run"):
        pass
    import_(tmp_path / "export", out=tmp_path / "run")
    assert checkpoint_folder.steps(tmp_path / "run") == [0]


@pytest.fixture
def busy(monkeypatch):
    """Makes paths unremovable, as on a network file system while another process reads them."""
    paths = set()
    originals = {"rmtree": shutil.rmtree, "unlink": os.unlink}

    def refuse(name, path, *arguments, **options):
        if os.fspath(path) in map(os.fspath, paths):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return originals[name](path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", lambda *a, **o: refuse("rmtree", *a, **o))
    monkeypatch.setattr(os, "unlink", lambda *a, **o: refuse("unlink", *a, **o))
    return paths


def test_unremovable_old_checkpoint_does_not_end_run(tmp_path, busy, capsys):
    for step in (1, 2, 3):
        save(tmp_path / "run", step, keep=9)
    first, second = (checkpoint_folder.path_of(tmp_path / "run", step) for step in (1, 2))
    shutil.move(first, tmp_path / "moved")
    first.symlink_to(tmp_path / "moved")
    busy.add(second)
    save(tmp_path / "run", 4, keep=1)
    assert checkpoint_folder.steps(tmp_path / "run") == [2, 4]
    checkpoint_folder.verify(tmp_path / "moved")
    told = capsys.readouterr().err
    assert told == f"warning: {second}: not removed (Device or resource busy); it is no longer needed\n"
    busy.clear()
    save(tmp_path / "run", 5, keep=1)
    assert checkpoint_folder.steps(tmp_path / "run") == [5] and capsys.readouterr().err == ""


@pytest.mark.parametrize("left", ["folder", "link"])
def test_unremovable_leftovers_are_ignored(tmp_path, busy, capsys, left):
    """Leftovers of an atomic file, of an atomic folder, and of a renamed checkpoint."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    leftovers = [tmp_path / "checkpoints" / name for name in (".step-9.writing", ".step-9.replaced", "damaged-step-2")]
    for path in leftovers:
        if left == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path)
    (tmp_path / "checkpoints/step-9").mkdir()
    busy.update(leftovers)
    atomic_files.recover_all(tmp_path / "checkpoints")
    (tmp_path / "checkpoints/step-9").rmdir()
    (tmp_path / "checkpoints/step-2/state.json").write_text("{")
    directory, (warning,) = checkpoint_folder.recover_run(tmp_path)
    assert directory.name == "step-1" and "renamed to damaged-damaged-step-2" in warning
    said = capsys.readouterr().err
    assert all(f"warning: {path}: not removed" in said for path in leftovers) and len(said.splitlines()) == 3
    assert all(os.path.lexists(path) for path in leftovers)

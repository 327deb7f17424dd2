"""The mirror of a run in an object store (`train.mirror`): its newest checkpoints, logs, configuration and tokenizer.

The store has the layout of the run's folder. A checkpoint in it is complete once it has a state.json, which is uploaded
last. `mirror.json` has the ids of the run and of its latest session. Only this session may write.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from electra_fast.config.section import parse_toml
from electra_fast.data.object_store import delete_objects, download, list_objects, read, upload, upload_folder, url_of
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import foreign_names, remove, replace_file, replace_folder
from electra_fast.files.checkpoint_folder import STATE
from electra_fast.files.json_files import json_text, parse_json
from electra_fast.messages import say

OWNER = "mirror.json"
# Folder in a run for files that are being copied, so that training may remove and change the originals.
_COPIES = ".mirror"
# Longest wait for the last copy when a run fails.
_FAILED_SECONDS = 60.0


def checked_url(url: str) -> str:
    """Returns a value of `train.mirror` in normal form. Raises ValueError unless it is a URL or empty."""
    parsed = url_of(url) if url else ""
    if parsed is None:
        raise InputError(f'train.mirror = "{url}": must be a URL in an object store, such as s3://bucket/run')
    return parsed


def read_config(url: str) -> dict[str, Any] | None:
    """Returns config.toml of the mirrored run, parsed, or None if there is none."""
    path = f"{checked_url(url)}/config.toml"
    if (content := read(path)) is None:
        return None
    try:
        return parse_toml(content.decode())
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def restore(run: Path, url: str, *, goes_back: bool) -> None:
    """Downloads the mirror's newest intact checkpoint if it is newer than the folder's, unless the run goes back.

    Also downloads the best checkpoint, logs, configuration and tokenizer. Warns about newer checkpoints that are
    damaged or incomplete. Raises ValueError if the mirror belongs to another run, or if no checkpoint in it is intact.
    """
    owner = _owner(url)
    run_id = _run_of(run)
    local = checkpoint_folder.steps(run)
    if owner is None:
        if objects := list_objects(url):
            raise InputError(
                f"{url}: contains {objects[0][0]} but no mirror of a run; choose an empty prefix (train.mirror)"
            )
        return
    if (run_id or local) and run_id != owner:
        raise InputError(
            f"{url}: the mirror of a run other than {run}; choose another train.mirror, or another --out to resume it"
        )
    is_run = local or (run / "config.toml").exists()
    if goes_back or (not is_run and foreign_names(run)):  # `open_run` refuses a folder with other files
        return
    there = _checkpoints(url)
    newest = local[-1] if local else -1
    problems = []
    for step in sorted((step for step in there if step > newest), reverse=True):
        if problem := _download(run, url, step, there[step], with_files=True):
            problems.append(problem)
            continue
        say(f"{url}: downloaded step-{step}" + (f"; {run} ended at step {newest}" if local else ""))
        best = checkpoint_folder.read_state(checkpoint_folder.path_of(run, step)).best_step
        if best in there and best not in (step, *local):
            _download(run, url, best, there[best])
        return
    if not local and any(STATE in names for names in there.values()):
        reasons = "; ".join(problems)
        raise InputError(f"{url}: no intact checkpoint: {reasons}; choose another train.mirror to start again")


def claim(run: Path, url: str, from_step: int | None) -> None:
    """Makes a URL the mirror of a run, and this session the only writer.

    Removes checkpoints after `from_step`. Raises ValueError if it is another run's mirror, and OSError or ValueError if
    it is not writable.
    """
    run_id = _run_of(run) or _owner(url) or secrets.token_hex(8)
    path = run / OWNER
    replace_file(path, json_text({"run": run_id, "session": secrets.token_hex(8)}))
    if not upload(str(path), f"{url}/{OWNER}", if_absent=True):
        if _owner(url) != run_id:
            raise InputError(f"{url}: another run has started to write here; choose another train.mirror")
        upload(str(path), f"{url}/{OWNER}")
    if from_step is not None:
        for step, names in _checkpoints(url).items():
            if step > from_step:
                _delete(url, step, names)


@dataclass(frozen=True)
class _Copy:
    """Files to upload: `folder/files` has the run's small files, `folder/step-N` its checkpoints.

    `steps` are the steps of the newest checkpoint, which is in the folder, and of the best one.
    """

    folder: Path
    steps: list[int]


class Mirror:
    """Copies a run's checkpoints to its mirror in a thread, one at a time; a newer checkpoint replaces a waiting one.

    Failures are added to `problems`, and the next copy tries again. At exit after an error, waits up to a minute for
    the copy in progress. This session must have claimed `url`. The mirror keeps `keep` checkpoints and the best one.
    """

    def __init__(self, run: Path, url: str, keep: int) -> None:
        self._run = run
        self._url = url
        self._keep = keep
        self.problems: list[str] = []
        self._numbers = itertools.count()
        self._is_over = False
        self._changed = threading.Condition()
        self._next: _Copy | None = None
        self._current: _Copy | None = None

    def add(self, step: int, best_step: int | None) -> None:
        """Starts to copy the complete checkpoint of a step, the best checkpoint and the run's small files.

        Links or copies all files first, so that the originals may change or be removed afterwards.
        """
        if self._is_over:
            return
        try:
            added = self._collect(step, best_step)
        except OSError as error:
            self._fail(step, error)
            return
        with self._changed:
            skipped = self._next
            self._next = added
            self._changed.notify_all()
        if skipped is not None:
            remove(skipped.folder)

    def wait_up_to(self, seconds: float) -> bool:
        """Waits up to `seconds` for the copies; returns whether all are finished."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and self._current is None, seconds)

    def take_problems(self) -> list[str]:
        """Returns the failures since the last call, each with the URL and the checkpoint."""
        return [self.problems.pop(0) for _ in range(len(self.problems))]

    def close(self) -> None:
        """Cancels unfinished copies, and adds a problem if there are any. `add` has no effect afterwards."""
        with self._changed:
            unfinished = None if self._is_over else self._next or self._current
            self._is_over = True
        if unfinished is not None:
            self._fail(unfinished.steps[0], "the copy was not finished in time")
        remove(self._run / _COPIES)

    def __enter__(self) -> Self:
        remove(self._run / _COPIES)  # left by a kill
        # A daemon: at exit, the interpreter must not wait for a store that does not answer.
        threading.Thread(target=self._work, name="mirror", daemon=True).start()
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        if isinstance(value, Exception):
            self.wait_up_to(_FAILED_SECONDS)
        self.close()
        for problem in self.take_problems():
            say(f"warning: {problem}")

    def _collect(self, step: int, best_step: int | None) -> _Copy:
        folder = self._run / _COPIES / str(next(self._numbers))
        files = folder / "files"
        files.mkdir(parents=True)
        for path in self._run.iterdir():
            if path.is_file() and not path.name.startswith(".") and path.name != OWNER:
                shutil.copyfile(path, files / path.name)
        shutil.copytree(self._run / "tokenizer", files / "tokenizer", copy_function=shutil.copyfile)
        steps = [candidate for candidate in dict.fromkeys((step, best_step)) if candidate is not None]
        for source in (checkpoint_folder.path_of(self._run, candidate) for candidate in steps):
            if source.is_dir():
                shutil.copytree(source, folder / source.name, copy_function=_link)
        return _Copy(folder, steps)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                copy = self._next
                self._next = None
                self._current = copy
            assert copy is not None
            try:
                if not self._is_over:
                    self._copy(copy)
            except Exception as error:  # no failure may end the run
                self._fail(copy.steps[0], error)
            remove(copy.folder)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _copy(self, copy: _Copy) -> None:
        if not self._is_own():
            return
        upload_folder(copy.folder / "files", self._url, "")
        there = _checkpoints(self._url)
        for step in copy.steps:
            if (folder := copy.folder / f"step-{step}").is_dir():
                self._copy_checkpoint(folder, is_there=STATE in there.get(step, ()))
        if not self._is_own():  # a later session may have later checkpoints
            return
        whole = {step for step, names in there.items() if STATE in names and step <= copy.steps[0]} | {*copy.steps}
        retained = {*sorted(whole)[-self._keep :], *copy.steps}
        # Also removes remains of failed copies, and steps that the run abandoned when it went back.
        for step in there.keys() - retained:
            _delete(self._url, step, there[step])

    def _is_own(self) -> bool:
        """Returns whether this session still owns the mirror. If not, stops copying."""
        if read(f"{self._url}/{OWNER}") == (self._run / OWNER).read_bytes():
            return True
        self._is_over = True
        self.problems.append(f"{self._url}: {OWNER} is missing or names another session; this session stops copying")
        return False

    def _copy_checkpoint(self, folder: Path, *, is_there: bool) -> None:
        url = f"{self._url}/checkpoints/{folder.name}"
        if is_there:
            if read(f"{url}/{STATE}") == (folder / STATE).read_bytes():
                return
            delete_objects(url, [STATE])  # marks the checkpoint as incomplete while its files are replaced
        upload_folder(folder, url, STATE)

    def _fail(self, step: int, reason: object) -> None:
        self.problems.append(
            f"{self._url}: step-{step} is not mirrored: {reason}; the next checkpoint or session will try again"
        )


def _owner(url: str) -> str | None:
    """Returns the id of the run whose mirror a URL is, or None."""
    content = read(f"{url}/{OWNER}")
    return None if content is None else _identity(content, f"{url}/{OWNER}")


def _run_of(run: Path) -> str | None:
    path = run / OWNER
    return _identity(path.read_bytes(), str(path)) if path.exists() else None


def _identity(content: bytes, place: str) -> str:
    try:
        return str(parse_json(content)["run"])
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{place}: has no id of a run ({error}); choose another train.mirror") from None


def _checkpoints(url: str) -> dict[int, list[str]]:
    """Returns the file names of each checkpoint in a mirror, complete or not, by step."""
    files_by_step: dict[int, list[str]] = {}
    for name, _ in list_objects(f"{url}/checkpoints"):
        folder, _, file = name.partition("/")
        step = checkpoint_folder.step_of(folder)
        if step is not None and _is_plain(file):
            files_by_step.setdefault(step, []).append(file)
    return files_by_step


def _download(run: Path, url: str, step: int, names: list[str], *, with_files: bool = False) -> str:
    """Downloads a checkpoint if it is intact. The run's small files are downloaded before it becomes visible.

    If it is damaged or incomplete, warns and returns a description of the problem; else returns an empty string.
    """
    place = f"{url}/checkpoints/step-{step}"

    def fill(directory: Path) -> None:
        for name in names:
            download(f"{place}/{name}", str(directory / name))
        checkpoint_folder.verify(directory)
        (run / "tokenizer").mkdir(exist_ok=True)
        for name, _ in list_objects(url) if with_files else ():
            if _is_plain(name.removeprefix("tokenizer/")):
                download(f"{url}/{name}", str(run / name))

    try:
        if STATE not in names:
            raise InputError(f"{place}: incomplete")
        replace_folder(checkpoint_folder.path_of(run, step), fill)
    except (FileNotFoundError, InputError) as error:
        hidden = str(checkpoint_folder.path_of(run, step).with_name(f".step-{step}.writing"))
        problem = str(error).split(";")[0].replace(hidden, place)
        say(f"warning: {problem}; not used")
        return problem
    return ""


def _delete(url: str, step: int, names: list[str]) -> None:
    """Removes a checkpoint from a mirror. The first request already marks it as incomplete."""
    place = f"{url}/checkpoints/step-{step}"
    delete_objects(place, [STATE])
    delete_objects(place, names)


def _is_plain(name: str) -> bool:
    """Returns whether a name from a store is a plain file name: not in another folder, and not hidden."""
    return "/" not in name and not name.startswith(".") and name != ""


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)

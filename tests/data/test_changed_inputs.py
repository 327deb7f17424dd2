"""Inputs that change after `prepare` has read them: the corpus has either the old text or the new one, never both."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_programs import contents

import electra_fast
from electra_fast import _data
from electra_fast.data.corpus import verify
from electra_fast.errors import InputError

# An input group is 4 MiB of input, mostly blank lines here to keep the tests fast.
BLANK_LINE = b" " * 1023 + b"\n"
PADDING = BLANK_LINE * 2048


def replace_byte(path, at, *, keep_time=False):
    """Changes one "a" to "b"; the size stays the same."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        assert file.read(1) == b"a"
        file.seek(at)
        file.write(b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (0 if keep_time else 1)))


def at_the_beginning(path):
    replace_byte(path, 0)


def between_the_samples(path):
    replace_byte(path, 1 << 20)


def with_its_time_kept(path):
    replace_byte(path, 1 << 20, keep_time=True)


def only_in_time(path):
    os.utime(path)


@pytest.fixture
def text(tmp_path):
    """Three files of one input group each, with an "a" at the beginning and another one at 1 MiB."""
    (tmp_path / "text").mkdir()
    for number in range(3):
        middle = b"a c\n\na" if number == 1 else b"a"
        text = (b"a b\n\nc a\n" + b" " * 1014 + b"\n" + BLANK_LINE * 1023) + middle + PADDING + b"c" + PADDING
        (tmp_path / f"text/{number}.txt").write_bytes(text)
    return tmp_path / "text"


@pytest.fixture
def run(tmp_path):
    """`prepare` of a folder into another one."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))

    def prepare(text, out, **options):
        arguments = {"files": [str(text)], "text_fields": ["text"], "threads": 1, **options}
        return _data.prepare(_data.Tokenizer(str(vocab)), str(tmp_path / out), **arguments)

    def by_tasks(text, out, **options):
        with ThreadPoolExecutor(1) as executor:
            arguments = {"vocab": vocab, "out": tmp_path / out, "progress": False, **options}
            return vars(electra_fast.prepare([text], executor=executor, **arguments))

    prepare.by_tasks = by_tasks
    return prepare


@pytest.mark.parametrize("edit", [at_the_beginning, with_its_time_kept, only_in_time])
def test_changed_input_of_a_finished_corpus_is_refused(text, run, tmp_path, edit):
    first = run(text, "out")
    before = contents(tmp_path / "out")
    edit(text / "1.txt")
    for verify_inputs in (False, True):
        if edit is only_in_time or (edit is with_its_time_kept and not verify_inputs):
            report = run(text, "out", verify_inputs=verify_inputs)
            assert report["already_complete"] and report["content_hash"] == first["content_hash"]
            continue
        for prepare in (run, run.by_tasks):
            with pytest.raises(InputError, match=r"1\.txt: has changed since .*out was prepared .*another --out"):
                prepare(text, "out", verify_inputs=verify_inputs)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("edit", "way"),
    [
        (between_the_samples, "again"),
        (between_the_samples, "by tasks"),
        (between_the_samples, "in parts"),
        (at_the_beginning, "without duplicates"),
        (with_its_time_kept, "other partition"),
        (only_in_time, "again"),
        (only_in_time, "by tasks"),
    ],
)
def test_interrupted_run_never_mixes_old_and_new_text(text, run, tmp_path, edit, way):
    """The first of two partitions leaves the same state as an interruption: some input groups are finished."""
    options = {"_part_bytes": 600_000} if way == "in parts" else {}
    if way == "without duplicates":
        options["drop_duplicates"] = "lines"
    changed = text / "0.txt"
    run(text, "out", partition=(1, 2), **options)
    if way == "without duplicates":
        run(text, "out", partition=(2, 2), **options)  # hashes the rest and builds its partition
    edit(changed)
    if edit is with_its_time_kept:
        options["verify_inputs"] = True
    resume = run.by_tasks if way == "by tasks" else run
    if way == "other partition":
        report = run(text, "out", partition=(2, 2), **options)
        assert report["missing_input_groups"] == (0 if edit is only_in_time else 1)
        report = run(text, "out", partition=(1, 2), **options)
    else:
        report = resume(text, "out", **options)
    undisturbed = run(text, "undisturbed", **options)
    assert report["complete"] and report["content_hash"] == undisturbed["content_hash"]
    assert verify(tmp_path / "out")
    if edit is only_in_time and way != "in parts":
        assert (report["rebuilt_input_groups"], report["changed_input"]) == (0, None)
    if edit is not only_in_time:
        assert report["rebuilt_input_groups"] > 0 and report["changed_input"] == str(changed)


def test_change_in_a_table_affects_all_its_parts(run, tmp_path):
    """The table's directory determines the rows of a part."""
    path = tmp_path / "table.parquet"
    table = pa.table({"text": [f"{letter} b c " * 2000 for letter in "bbbbbbba"]})
    pq.write_table(table, path, row_group_size=1, compression="none", use_dictionary=False, write_statistics=False)
    run(path, "out", partition=(1, 2), _part_bytes=30_000)
    replace_byte(path, path.read_bytes().rindex(b"a b c"))
    report = run(path, "out", _part_bytes=30_000)
    assert report["rebuilt_input_groups"] == 2 and report["changed_input"] == str(path)


def test_changed_size_and_damaged_list_are_reported(text, run, tmp_path):
    run(text, "out")
    changed = text / "2.txt"
    size = (text / "2.txt").stat().st_size
    for other in (size - 1, size + 1):
        os.truncate(changed, other)
        with pytest.raises(InputError, match=r"2\.txt: has changed since"):
            run(text, "out")
    listed = tmp_path / "out/inputs.json"
    record = json.loads(listed.read_text())
    record["inputs"][0]["modified"] += 1
    listed.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"inputs\.json: damaged; .*remove it"):
        run(text, "out")

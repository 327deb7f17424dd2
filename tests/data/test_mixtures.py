"""Several corpora in one run: names, training, resuming, ranks, and errors."""

import copy
import itertools
import json
import pickle
import shutil
import signal

import numpy as np
import pytest
import torch
from test_loader import digest
from tiny_run import STEPS, assert_same_run, lines, tiny_config

import electra_fast as ef
from electra_fast.cli import main
from electra_fast.config.config import Config
from electra_fast.data.loader import BatchLoader
from electra_fast.data.mixture import Mixture, absolute, missing_folder, stream_of, weighted_folders
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.ops.sampling import alias_table
from electra_fast.training.evaluate import evaluate
from electra_fast.training.pretrain import pretrain

OPTIONS = {"sequence_length": 16, "batch_size": 8, "seed": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_text, tiny_vocab):
    """Two corpora with validation sets, `wiki` and `books`, and `news` without; the first is the largest."""
    out = tmp_path_factory.mktemp("corpora")
    for name, documents, holdout in (
        ("wiki", tiny_text[:20], 0.2),
        ("books", tiny_text[20:30], 0.2),
        ("news", tiny_text[30:], 0.0),
    ):
        ef.prepare(iter(documents), vocab=str(tiny_vocab), out=out / name, holdout=holdout, progress=False)
    return out


@pytest.fixture(scope="module")
def mixed(folders):
    return [f"{folders / 'wiki'}:0.7", f"{folders / 'books'}:0.3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mixed):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("mixed") / "run"
    pretrain(mixed, config=tiny_config(), out=out)
    return out


class TestNames:
    def test_corpora_have_several_forms(self, folders):
        wiki, books = (str(folders / name) for name in ("wiki", "books"))
        urls = ["s3://bucket/wiki:0.7", "gs://bucket:8080/books"]  # split only before a number, and never made absolute
        for value, expected in (
            ([f"{wiki}:0.7", f"{books}:3"], [(wiki, 0.7), (books, 3.0)]),
            ({wiki: 0.7, folders / "books": 3}, [(wiki, 0.7), (books, 3.0)]),
            ([wiki, folders / "books"], [(wiki, None), (books, None)]),
            (folders / "wiki", [(wiki, None)]),
            ("wiki:0.7", [("wiki:0.7", None)]),
            (urls, [("s3://bucket/wiki", 0.7), ("gs://bucket:8080/books", None)]),
        ):
            assert weighted_folders(value) == expected
        assert absolute(urls) == urls and absolute(urls[0]) == urls[0] and missing_folder(urls) is None

    def test_existing_folder_with_the_whole_name_has_precedence(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run:2").mkdir()
        assert weighted_folders(["run:2", "run:3"]) == [("run:2", None), ("run", 3.0)]
        assert absolute(["run:2", "run:2:0.5"]) == [f"{tmp_path}/run:2", f"{tmp_path}/run:2:0.5"]
        assert absolute({"wiki": 1, "books": 0.25}) == {f"{tmp_path}/wiki": 1, f"{tmp_path}/books": 0.25}
        assert missing_folder(["run:2", "run:3"]) == "run"

    def test_other_values_are_refused(self):
        kinds = "must be a string, a list of strings, or a table of numbers"
        for value, message in ((["wiki", 3], kinds), ({"wiki": True}, kinds), ({}, "must have at least one entry")):
            with pytest.raises(ValueError, match=message):
                Config().override({"data.corpus": value})

    def test_names_are_short_if_they_differ(self, folders, tmp_path):
        assert Mixture([folders / "wiki", folders / "books"]).names() == ["wiki", "books"]
        other = shutil.copytree(folders / "books", tmp_path / "wiki")
        assert Mixture([folders / "wiki", other]).names() == [str(folders / "wiki"), str(other)]


class TestLoader:
    def test_list_mapping_and_copy_are_equivalent(self, folders, mixed):
        loader = BatchLoader(mixed, **OPTIONS)
        expected = digest(list(itertools.islice(loader, 30)))
        by_folder = {str(folders / "wiki"): 70, str(folders / "books"): 30}
        assert digest(list(itertools.islice(BatchLoader(by_folder, **OPTIONS), 30))) == expected
        rest = digest(list(itertools.islice(copy.copy(loader), 5)))
        assert digest(list(itertools.islice(pickle.loads(pickle.dumps(loader)), 5))) == rest
        resumed = BatchLoader(by_folder, **OPTIONS)
        resumed.restore(json.loads(json.dumps(loader.state())))
        assert digest(list(itertools.islice(resumed, 5))) == rest

    def test_list_of_one_folder_equals_the_folder(self, folders):
        alone = BatchLoader(folders / "wiki", **OPTIONS)
        first = digest([next(BatchLoader(folders / "wiki", **OPTIONS))])
        for listed in ([f"{folders / 'wiki'}:0.2"], {folders / "wiki": 5}):
            loader = BatchLoader(listed, **OPTIONS)
            assert loader.state() == alone.state() and list(loader.state()) == list(alone.state())
            assert Mixture(listed).content_hash == ef.Corpus(folders / "wiki").content_hash
            assert digest([next(loader)]) == first

    def test_state_of_another_mixture_is_refused(self, folders, mixed):
        state = BatchLoader(mixed, **OPTIONS).state()
        other = BatchLoader({folders / "wiki": 0.6, folders / "books": 0.4}, **OPTIONS)
        with pytest.raises(ValueError, match=r'weights = "7, 3", but this loader has "3, 2"'):
            other.restore(state)
        with pytest.raises(ValueError, match=r"corpora = .*, but this loader has"):
            BatchLoader(folders / "wiki", **OPTIONS).restore(state)
        turned = BatchLoader({folders / "books": 0.3, folders / "wiki": 0.7}, **OPTIONS)
        hashes = ", ".join(member["corpus"] for member in state["corpora"])
        with pytest.raises(ValueError, match=f'corpora = "{hashes}", but this loader has "'):
            turned.restore(state)
        state["corpora"][0]["turns"] = 2**64 - 1
        with pytest.raises(ValueError, match="turns = 18446744073709551615: must be at most"):
            BatchLoader(mixed, **OPTIONS).restore(state)


class TestMixture:
    def test_token_counts_are_expected_counts(self, folders, mixed):
        wiki, books = (ef.Corpus(folders / name) for name in ("wiki", "books"))
        counts = Mixture(mixed).token_counts()
        total = wiki.num_tokens + books.num_tokens
        frequencies = 0.7 * wiki.token_counts() / wiki.num_tokens + 0.3 * books.token_counts() / books.num_tokens
        np.testing.assert_allclose(counts, frequencies * total, rtol=1e-12)
        both = Mixture([wiki.path, books.path]).token_counts()
        np.testing.assert_allclose(both, wiki.token_counts() + books.token_counts(), rtol=1e-12)
        alone = Mixture(wiki.path).token_counts()
        assert alone.dtype == np.int64 and (alone == wiki.token_counts()).all()

    def test_validation_uses_corpora_with_a_validation_set(self, folders, tmp_path):
        parts = [ef.Corpus(folders / name).holdout for name in ("wiki", "books")]
        assert Mixture([folders / name for name in ("wiki", "news", "books")]).holdout == parts
        assert Mixture(folders / "news").holdout is None and Mixture(folders / "wiki").holdout == parts[0]
        data = [folders / name for name in ("wiki", "books", "news")]
        out = tmp_path / "run"
        pretrain(data, config=tiny_config(**{"train.steps": "1", "data.packing": "best-fit"}), out=out)
        expected = [BatchLoader(part, **OPTIONS).num_rows for part in parts]
        assert evaluate(out, data, mlm_examples=3)["rows"] == sum(expected)


class TestTraining:
    def test_metrics_have_passes_over_each_corpus(self, whole, whole_run, folders, mixed):
        assert all("epochs" not in record for record in lines(whole_run))  # of one corpus
        records = lines(whole)
        assert [list(record["epochs"]) for record in records] == [["wiki", "books"]] * 6
        loader = BatchLoader.from_config(Config.load(whole / "config.toml"))
        for _ in range(STEPS):
            next(loader)
        assert list(records[-1]["epochs"].values()) == [round(epochs, 6) for epochs in loader.passes()]
        assert Config.load(whole / "config.toml").data.corpus == mixed
        state = checkpoint_folder.read_state(checkpoint_folder.latest(whole))
        hashes = [ef.Corpus(folders / name).content_hash for name in ("wiki", "books")]
        assert state.corpus == Mixture(mixed).content_hash == f"{hashes[0]}:7 {hashes[1]}:3"
        assert len(state.loader["corpora"]) == 2
        evaluation = lines(whole, "evaluations.jsonl")[-1]
        assert evaluation["rows"] == 2 * 8

    @pytest.mark.slow
    def test_killed_run_resumes_from_its_folder(self, server, whole, mixed, tmp_path, capfd):
        server.wait(server.start(1, mixed, tmp_path / "run", {"ELECTRA_FAST_FAULT": "kill@8/0"}), -signal.SIGKILL)
        assert main(["pretrain", "--out", str(tmp_path / "run")]) == 0
        assert "resumes at step" in capfd.readouterr().err
        assert_same_run(tmp_path / "run", whole)

    def test_changed_weights_need_permission_and_keep_each_corpus_order(self, whole, folders, tmp_path, capsys):
        run = shutil.copytree(whole, tmp_path / "run")
        before = checkpoint_folder.read_state(checkpoint_folder.latest(run)).loader
        data = {str(folders / "wiki"): 1, str(folders / "books"): 1}
        longer = tiny_config(**{"train.steps": "28"})
        message = r"trained on the corpus with content hash .*:7 .*:3, but .* has .*:1 .*:1; pass that"
        with pytest.raises(ValueError, match=message):
            pretrain(data, config=longer, out=run)
        pretrain(data, config=longer, out=run, allow_changes=True)
        assert "existing corpora continue from their current position" in capsys.readouterr().err
        after = checkpoint_folder.read_state(checkpoint_folder.latest(run)).loader["corpora"]
        loader = BatchLoader.from_config(longer, corpus=data)
        shares = [member | {"weight": 1, "turns": 0} for member in before["corpora"]]
        loader.restore(before | {"corpora": shares})
        for _ in range(4):
            next(loader)
        assert after == loader.state()["corpora"] and [member["turns"] for member in after] == [16, 16]
        pretrain(data, config=tiny_config(**{"train.steps": "32"}), out=run)

    def test_run_continues_from_one_corpus_to_several(self, folders, tmp_path, capsys):
        config = tiny_config(**{"train.steps": "4"})
        pretrain(folders / "wiki", config=config, out=tmp_path / "run")
        longer = tiny_config(**{"train.steps": "8"})
        pretrain([folders / "news", folders / "wiki"], config=longer, out=tmp_path / "run", allow_changes=True)
        assert "the data order restarts with a new epoch" in capsys.readouterr().err
        news, wiki = checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / "run")).loader["corpora"]
        assert wiki["epoch"] > news["epoch"] == 0

    def test_unigram_generator_draws_from_the_mixture(self, mixed, tmp_path):
        changes = {"generator.kind": "unigram", "train.steps": "1", "model.tying": "none"}
        pretrain(mixed, config=tiny_config(**changes), out=tmp_path / "run")
        expected = alias_table(torch.from_numpy(Mixture(mixed).token_counts()))
        assert (ef.load(tmp_path / "run").model.proposal.table_V2 == expected).all()

    def test_evaluate_reads_a_mixture(self, whole, folders, mixed, tmp_path):
        assert main(["evaluate", str(whole), *mixed, "--mlm-examples", "2", "--json"]) == 0
        alone = evaluate(whole, folders / "wiki")
        both = evaluate(whole, mixed, corrupted_by="unigram")
        assert both["rows"] > alone["rows"] and both["corruption"]


REFUSED = [
    (["wiki:0.7", "none:0.3"], "none: "),
    (["wiki:nan", "books:1"], "wiki: weight = NaN: must be a number above 0"),
    (["wiki:0", "books:1"], "wiki: weight = 0: must be a number above 0"),
    (["wiki:inf", "books:1"], "wiki: weight = inf: must be a number above 0"),
    (["wiki:1", "books"], "books: has no weight; pass weights for all corpora or for none"),
    (["wiki:1e300", "books:1"], "too far apart, or with too many digits; round them"),
    (["wiki:0.7", "wiki:0.3"], "wiki and wiki are the same corpus (content hash"),
    (["wiki:1", "foreign:1"], "wiki and foreign have different vocabularies (hashes "),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=[" ".join(data) for data, _ in REFUSED])
def test_wrong_mixture_is_one_line_and_exit_code_2(folders, tiny_text, tmp_path, capsys, monkeypatch, data, message):
    if any("foreign" in entry for entry in data):
        words = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"])
        (tmp_path / "vocab.txt").write_text(words + "\n")
        foreign = folders / "foreign"
        ef.prepare(iter(tiny_text[:5]), vocab=str(tmp_path / "vocab.txt"), out=foreign, progress=False)
        capsys.readouterr()
    monkeypatch.chdir(folders)
    assert main(["pretrain", *data, "--preset", "tiny", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("electra-fast: error: ") and said.count("\n") == 1
    assert message in said.replace(f"{folders}/", "")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_moved_folder_is_reported_with_its_configuration_file(folders, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(f'preset = "tiny"\n[data]\ncorpus = ["{folders}/wiki:1", "{tmp_path}/gone:2"]\n')
    assert main(["pretrain", "--config", str(path), "--out", str(tmp_path / "run")]) == 2
    assert f'{path}: data.corpus = "{tmp_path}/gone": no such folder; pass its new' in capsys.readouterr().err


def test_incomplete_state_is_refused_when_settings_change(folders):
    state = BatchLoader(folders / "wiki", sequence_length=16, batch_size=4).state()
    for name in ("seed", "options", "corpus", "epoch", "group", "row"):
        with pytest.raises(InputError, match=f"checkpoint: loader.{name} is missing"):
            stream_of(state | {name: None})

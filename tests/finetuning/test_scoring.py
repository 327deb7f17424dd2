"""Scores of texts, compared with `transformers` on the same folders, and minimal pairs ranked by the scores."""

import csv
import json
import math

import numpy as np
import pytest
import torch
import transformers
from in_process import run as run_command
from test_encoder import ROBERTA, hf_folder
from test_error_detection import save_run
from test_pair_templates import save_tokenizer
from torch.nn.functional import log_softmax, logsigmoid

import electra_fast as ef
from electra_fast.finetuning import scoring
from electra_fast.huggingface.export import export
from electra_fast.huggingface.folder import read_model

TEXTS = ["the value of a name", "The cat, the class!", "name", "the value of a name " * 3, "zzz objekt 7"]
PAIRS = [
    {"sentence_good": "the value of a name", "sentence_bad": "value the of a name", "UID": "order", "n": 1},
    {"sentence_good": "The name", "sentence_bad": "the NAME", "UID": "case", "n": 2},
    {"sentence_good": "a class", "sentence_bad": "a class of the value, 7", "UID": "order", "n": 3},
]


@torch.no_grad()
def pseudo_log_likelihood(folder, text):
    """Computes the score like the backend `mlm` of the evaluation pipeline of the BabyLM challenge 2025."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    read = tokenizer(text, return_offsets_mapping=True)
    places = [place for place, (_, end) in enumerate(read["offset_mapping"]) if end > 0]
    ids = torch.tensor(read["input_ids"])
    copies = ids.repeat(len(places), 1)
    copies[range(len(places)), places] = tokenizer.mask_token_id
    logits = model(input_ids=copies, attention_mask=torch.ones_like(copies)).logits[range(len(places)), places]
    return log_softmax(logits, -1).gather(1, ids[places, None]).sum().item()


@torch.no_grad()
def replaced_logits(folder, text):
    """Returns the discriminator's logits for a text's tokens, without [CLS] and [SEP]."""
    [name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    read = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    logits = getattr(transformers, name).from_pretrained(folder).eval()(**read).logits[0, 1:-1].double()
    return logits[:, 1] - logits[:, 0] if logits.dim() == 2 else logits


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_vocab):
    return save_run(tmp_path_factory.mktemp("modern") / "run", tiny_vocab, recipe="modern")


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_discriminator_and_generator_scores_equal_transformers(tmp_path, tiny_vocab, recipe):
    """The discriminator needs one pass, the generator one per token; a run and its export score equally."""
    run = save_run(tmp_path / "run", tiny_vocab, recipe=recipe)
    exported = tmp_path / "export"
    export(run, out=exported, unfinished=True)
    logits = [replaced_logits(exported / "discriminator", text) for text in TEXTS]
    log_p = np.array([pseudo_log_likelihood(exported / "generator", text) for text in TEXTS])
    original = np.array([logsigmoid(-text_logits).sum().item() for text_logits in logits])
    expected = {"discriminator": original, "generator": log_p, "both": original + 0.02 * log_p}
    for source in (run, exported):
        model = ef.load(source)
        scores = {kind: model.score(iter(TEXTS), kind) for kind in expected}
        for kind, values in expected.items():
            assert scores[kind] == pytest.approx(values, rel=1e-5, abs=1e-5), (source, kind)
            assert scores[kind].dtype == np.float64 and np.ptp(scores[kind]) > 1
            [alone] = model.score([TEXTS[1]], kind)
            assert alone == pytest.approx(scores[kind][1], rel=1e-5)
    assert ef.load(exported / "discriminator").score(TEXTS) == pytest.approx(expected["discriminator"], rel=1e-5)
    assert ef.load(exported / "generator").score(TEXTS) == pytest.approx(log_p, rel=1e-5)


@torch.no_grad()
def test_deberta_scores_equal_networks(tmp_path, tiny_vocab):
    """Compares one text at a time; the discriminator's token table is the sum of the generator's and a second table."""
    run = save_run(tmp_path, tiny_vocab, recipe="deberta")
    model = read_model(run)
    loaded = ef.load(run)
    special = loaded.tokenizer.special_tokens
    vectors = loaded.encode(TEXTS, pooling="cls")
    scores = {kind: loaded.score(TEXTS, kind) for kind in ("discriminator", "generator")}
    for number, [ids] in enumerate(loaded.tokenizer.encode_batch([text]) for text in TEXTS):
        row = torch.tensor([[special["cls"], *ids, special["sep"]]])
        places = torch.arange(len(ids))
        vector = model.hidden("discriminator", *model._flat_inputs(row, None, None))[0]
        assert vectors[number] == pytest.approx(vector.numpy(), abs=1e-5)
        original = logsigmoid(-model.discriminator_logits(row)[0, 1:-1]).sum().item()
        assert scores["discriminator"][number] == pytest.approx(original, rel=1e-5)
        copies = row.repeat(len(ids), 1)
        copies[places, places + 1] = special["mask"]
        log_p = log_softmax(model.generator_logits(copies)[places, places + 1], -1)
        assert scores["generator"][number] == pytest.approx(log_p.gather(1, row[0, 1:-1, None]).sum().item(), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "role", "head"),
    [
        ({"recipe": "modern"}, "discriminator", "corrective_head"),
        ({"objective.name": "replace-mlm", "recipe": "modern"}, "encoder", "encoder_head"),
        ({"objective.name": "all-tokens-mlm", "recipe": "modern"}, "encoder", "encoder_head"),
    ],
)
def test_corrective_score_is_probability_of_original_tokens(tmp_path, tiny_vocab, changes, role, head):
    run = save_run(tmp_path, tiny_vocab, **changes)
    model = read_model(run)
    loaded = ef.load(run)
    for text, score in zip(TEXTS, loaded.score(TEXTS, "corrective"), strict=True):
        [ids] = loaded.tokenizer.encode_batch([text])
        special = loaded.tokenizer.special_tokens
        row = torch.tensor([[special["cls"], *ids, special["sep"]]])
        hidden = model.hidden(role, *model._flat_inputs(row, None, None))
        log_p = log_softmax(getattr(model, head)(hidden, model.embeddings.token), -1)
        assert score == pytest.approx(log_p.gather(1, row.T)[1:-1].sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "tokenizer"),
    [
        ("BertForMaskedLM", {}, "BERT"),
        ("RobertaForMaskedLM", ROBERTA, "RoBERTa"),
        ("DistilBertForMaskedLM", {}, "DistilBERT"),
    ],
)
def test_masked_language_models_equal_transformers(tmp_path, name, settings, tokenizer):
    hf_folder(tmp_path, name, vocab_size=320, **settings)
    (tmp_path / "vocab.txt").unlink()
    save_tokenizer(tmp_path, tokenizer)
    texts = ["the cats sat", "a café in new york", "the"]
    expected = [pseudo_log_likelihood(tmp_path, text) for text in texts]
    model = ef.load(tmp_path)
    assert model.score(texts) == pytest.approx(expected, rel=1e-5) and np.ptp(expected) > 1
    with pytest.raises(ValueError, match="kind = 'corrective': must be one of generator"):
        model.score(texts, "corrective")


def test_masked_copies_in_several_parts_score_equally(run, monkeypatch):
    model = ef.load(run)
    expected = model.score(TEXTS * 2, "both")
    monkeypatch.setattr(scoring, "_COPIED_TOKENS", 20)
    assert model.score(TEXTS * 2, "both") == pytest.approx(expected, rel=1e-6)
    assert len(model.score([])) == 0


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["name", " "], "example 1: must have 1 to 126 tokens for this model, got 0"),
        (["name " * 127], "example 0: must have 1 to 126 tokens for this model, got 127"),
        ("name", "score takes a list of texts"),
        (["name", None], "example 1 = None: must be a string"),
    ],
)
def test_texts_without_score_are_refused(run, texts, message):
    with pytest.raises(ValueError, match=message):
        ef.load(run).score(texts)


class TestPairs:
    def test_accuracy_by_group_with_ties_counted_half(self, run, write_rows, tmp_path, capsys):
        report = ef.evaluate(run, pairs=write_rows(PAIRS), out=tmp_path / "out")
        model = ef.load(run)
        kinds = ["discriminator", "both", "corrective", "generator"]
        assert list(report.accuracy) == kinds and report.pairs == 3
        for kind in kinds:
            better, worse = (model.score([pair[name] for pair in PAIRS], kind) for name in list(PAIRS[0])[:2])
            right = (better > worse).astype(float)
            assert report.groups["order"] == report.groups["order"] | {"pairs": 2, kind: (right[0] + right[2]) / 2}
            assert report.groups["case"][kind] == 0.5  # the vocabulary has no case
            assert report.accuracy[kind] == (report.groups["order"][kind] + 0.5) / 2
            low, high = report.interval[kind]
            variances = [p * (1 - p) / n for p, n in (((2 * report.groups["order"][kind] + 2) / 6, 6), (0.5, 5))]
            half = 1.96 * math.sqrt(sum(variances)) / 2
            expected = (max(0, report.accuracy[kind] - half), min(1, report.accuracy[kind] + half))
            assert (low, high) == pytest.approx(expected)
        assert "note: 1 of 3 pairs have identical tokens in" in capsys.readouterr().err
        rows = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
        assert [row["group"] for row in rows] == ["order", "order", "case"] and rows[2]["worse"] == "the NAME"
        assert rows[0]["discriminator"] == pytest.approx(
            list(model.score(list(PAIRS[0].values())[:2], "discriminator"))
        )
        assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == json.loads(report.to_json())
        assert "3 pairs in 2 groups" in str(report) and "\norder " in str(report)

    def test_files_and_tables(self, run, write_rows, tmp_path):
        expected = ef.evaluate(run, pairs=PAIRS)
        path = tmp_path / "minimal.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["worse one", "better one", "n"])
            rows.writerows([pair["sentence_bad"], pair["sentence_good"], pair["n"]] for pair in PAIRS)
        options = ["--text", "better one,worse one", "--json"]
        report = json.loads(run_command("evaluate", run, "--pairs", path, *options).stdout)
        assert report["groups"].keys() == {"minimal"}
        assert json.loads(run_command("evaluate", run, "--pairs", path, path, *options).stdout)["pairs"] == 6
        by_number = ef.evaluate(run, pairs=[path, path], text=("better one", "worse one"), group="n")
        for kind, fraction in expected.groups["order"].items():
            if kind != "pairs":
                first = by_number.groups["1"][kind]
                last = by_number.groups["3"][kind]
                assert fraction == (first + last) / 2 and report["accuracy"][kind] == pytest.approx(
                    (2 * fraction + 0.5) / 3
                )
        assert [group["pairs"] for group in by_number.groups.values()] == [2, 2, 2]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"text": ["n"]}, "text = n: must be two columns; pass the better sentence first"),
            ({"text": ["sentence_good", "m"]}, "no 'm'; available columns: sentence_good, .*; choose with --text"),
            ({"text": ["sentence_good", "n"]}, "n = 1: must be text"),
            ({"group": "field"}, "no column 'field'; available columns: UID, n; choose with --group"),
            ({"pairs": []}, "pairs: "),
            ({"data": "shards"}, "data and pairs: cannot be combined"),
            ({"max_batches": 3}, "--max-batches: is not for --pairs"),
        ],
    )
    def test_invalid_options_are_refused(self, run, write_rows, options, message):
        with pytest.raises(ValueError, match=message):
            ef.evaluate(run, **{"pairs": write_rows(PAIRS)} | options)

    def test_empty_sentence_is_reported_with_line(self, run, write_rows):
        with pytest.raises(ValueError, match=r"line 2: must have 1 to 126 tokens for this model, got 0"):
            ef.evaluate(run, pairs=write_rows([PAIRS[0], PAIRS[0] | {"sentence_bad": ""}]))

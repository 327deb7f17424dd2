"""A fixed corruptor: every model reads the same text, however its rows are divided; unusable sources are refused."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from test_electra import LOCAL, make_model
from tiny_run import tiny_config
from variants import VARIANTS

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.data.corpus import write_tokenizer
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.objectives.objective import METRICS
from electra_fast.ops.operations import use_impl
from electra_fast.ops.sampling import alias_table, philox, sample_alias_reference
from electra_fast.training.corruptor import Corruptor, masked_states, sample_softmax
from electra_fast.training.evaluate import SEED, evaluate

CPU = torch.device("cpu")
# Masking and packing of a corruptor, independent of the models' recipes.
ROWS = {"masking": "tokens", "mask_prob": 0.15, "packing": "best-fit", "seed": SEED, "epochs": 1}
MLM = ("mlm_accuracy", "mlm_recall_at_100", "mlm_generator_accuracy")


def save_run(folder, corpus, recipe="google", **changes):
    """Saves a run with a tokenizer and a checkpoint of an untrained model whose logits differ from 0."""
    vocab_size = str(ef.Corpus(corpus).vocab_size)
    model = make_model(tiny_config(recipe, **{"model.vocab_size": vocab_size} | changes))
    write_tokenizer(folder / "tokenizer", ef.Tokenizer.of(ef.Corpus(corpus)), 128)
    checkpoint.save(folder, model, None, TrainState(), keep=1)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, validation_corpus):
    """Untrained models of both architectures, `modern` with local attention."""
    folder = tmp_path_factory.mktemp("untrained")
    changes = {"data.sequence_length": "32"}
    return {
        "google": save_run(folder / "google", validation_corpus, **changes),
        "modern": save_run(folder / "modern", validation_corpus, "modern", **LOCAL, **changes),
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory, whole_run):
    folder = tmp_path_factory.mktemp("exported") / "hf"
    ef.export(whole_run, out=folder)
    return folder


def loader_of(corpus, length, batch_size, **parts):
    return BatchLoader(ef.Corpus(corpus).holdout, sequence_length=length, batch_size=batch_size, **ROWS, **parts)


def digits(rows):
    """Returns the hash of texts, which are lists of ids."""
    whole = np.concatenate([np.asarray(row, dtype="<i4") for row in rows])
    return hashlib.sha256(whole.tobytes()).hexdigest()[:16]


def by_hand(batch, row, samples_N):
    """Returns the corrupted and the original ids of a row, with padding, as lists."""
    original = batch["input_ids"][row].tolist()
    for slot, weight in enumerate(batch["masked_weights"][row].tolist()):
        if weight:
            assert original[batch["masked_positions"][row, slot]] == 4
            original[batch["masked_positions"][row, slot]] = int(batch["masked_ids"][row, slot])
    corrupted = list(original)
    for slot, weight in enumerate(batch["masked_weights"][row].tolist()):
        if weight:
            corrupted[batch["masked_positions"][row, slot]] = int(samples_N[slot])
    return corrupted, original


def test_all_objectives_read_same_corrupted_text(validation_corpus, tmp_path):
    texts = set()
    for name in ("electra15", "mlm", "contrastive", "adversarial", "unigram", "all-tokens-mlm", "replace-mlm, unigram"):
        changes = {"data.sequence_length": "32", "model.num_layers": "1"}
        run = save_run(tmp_path / name, validation_corpus, **VARIANTS[name] | changes)
        few = {"sequence_length": 32, "batch_size": 8, "max_batches": 2, "mlm_examples": 3}
        report = evaluate(run, validation_corpus, corrupted_by="unigram", **few)
        texts.add((report["corruption"], report["tokens"], report["rows"], report["sequence_length"]))

        networks = ef.load(run).model.networks.keys()
        expected = {"generator_loss", "generator_accuracy"} if "generator" in networks else set()
        if "discriminator" in networks or name == "all-tokens-mlm":
            expected |= {name for name in METRICS if "discriminator" in name and name != "discriminator_loss"}
            expected |= {"unigram_auc", "discriminator_auc", "replaced_fraction"}
        if "discriminator" in networks:
            expected.add("discriminator_loss")
        if "encoder" in networks:
            expected |= {"encoder_loss", "encoder_accuracy", "replaced_fraction"}
        if "generator" in networks and "encoder" not in networks:
            expected |= set(MLM[:2] if name == "mlm" else MLM)
        assert report["mlm_examples"] == (3 if expected & set(MLM) else 0)
        numbers = {"rows", "tokens", "sequence_length", "corruption", "mlm_examples"}
        assert {name for name, value in report.items() if value is not None} == expected | numbers
        assert {"loss", *METRICS, *MLM} <= report.keys()
        assert not {"contrastive_loss", "reward", "policy_loss"} & report.keys()
    ((_, _, rows, length),) = texts
    assert (rows, length) == (16, 32)


@pytest.mark.parametrize(
    "name", ["electra15", *(pytest.param(name, marks=pytest.mark.slow) for name in ("contrastive", "unigram"))]
)
def test_metrics_computed_on_corrupted_text(name, runs, validation_corpus, tmp_path):
    """The expected metrics cover all tokens and segments, from single texts without packing or padding."""
    run = save_run(tmp_path / "run", validation_corpus, **VARIANTS[name] | {"data.sequence_length": "32"})
    report = evaluate(run, validation_corpus, batch_size=4, max_batches=2, corrupted_by=runs["google"])
    model = ef.load(run).model
    corruptor = Corruptor.load(runs["google"], ef.Corpus(validation_corpus), SEED, CPU)
    loader = loader_of(validation_corpus, 32, 4)
    rows = []
    answers = []
    nll = []
    for first_row in (0, 4):
        batch = to_torch(next(loader))
        samples = corruptor.sample(batch, first_row)
        for row in range(4):
            corrupted, original = by_hand(batch, row, samples[row])
            rows.append(corrupted[: int((batch["segment_ids"][row] > 0).sum())])
            for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
                inside = (batch["segment_ids"][row] == segment).nonzero()[:, 0].tolist()
                logits = model.discriminator_logits(torch.tensor([[corrupted[i] for i in inside]]))[0].tolist()
                answers += [(z, corrupted[i] != original[i]) for z, i in zip(logits, inside, strict=True)]
                if "generator" in model.networks:
                    logits = model.generator_logits(batch["input_ids"][row, inside][None])[0].log_softmax(-1)
                    masked = [k for k, i in enumerate(inside) if batch["input_ids"][row, i] == 4]
                    nll += [-logits[k, original[inside[k]]].item() for k in masked]
    z = np.array([logit for logit, _ in answers])
    is_replaced = np.array([label for _, label in answers])
    assert report["corruption"] == digits(rows) and report["tokens"] == len(answers)
    assert report["replaced_fraction"] == pytest.approx(is_replaced.mean())
    loss = np.log1p(np.exp(np.where(is_replaced, -z, z))).mean()
    assert report["discriminator_loss"] == pytest.approx(loss, rel=1e-5)
    assert report["discriminator_accuracy"] == pytest.approx(((z > 0) == is_replaced).mean())
    assert report["discriminator_recall"] == pytest.approx((z[is_replaced] > 0).mean())
    above = (z[is_replaced][:, None] > z[~is_replaced]) + 0.5 * (z[is_replaced][:, None] == z[~is_replaced])
    assert report["discriminator_auc"] == pytest.approx(above.mean(), abs=1e-4)
    assert report["generator_loss"] == (pytest.approx(np.mean(nll), rel=1e-5) if nll else None)


def test_samples_follow_generator_softmax(runs, validation_corpus):
    """The softmax at each mask is computed from single texts; `sample_softmax` samples it by inverting the CDF."""
    corpus = ef.Corpus(validation_corpus)
    batch = to_torch(next(loader_of(validation_corpus, 32, 6)))
    num_slots = batch["masked_ids"].numel()
    table = alias_table(torch.from_numpy(corpus.token_counts()))
    seed = torch.tensor([SEED, 0])
    expected = sample_alias_reference(table, torch.arange(num_slots), seed).view(batch["masked_ids"].shape)
    assert torch.equal(Corruptor.unigram(corpus, SEED, CPU).sample(batch, 0), expected)
    for source in runs.values():
        model = ef.load(source).model
        corruptor = Corruptor.load(source, corpus, SEED, CPU)
        samples = corruptor.sample(batch, 7)
        slots = batch["masked_ids"].shape[1]
        for row in range(6):
            for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
                inside = (batch["segment_ids"][row] == segment).nonzero()[:, 0].tolist()
                logits = model.generator_logits(batch["input_ids"][row, inside][None])[0]
                for slot, position in enumerate(batch["masked_positions"][row].tolist()):
                    if position in inside and batch["masked_weights"][row, slot]:
                        number = torch.tensor([(7 + row) * slots + slot])
                        logits_1V = logits[inside.index(position)][None]
                        assert sample_softmax(logits_1V, number, seed) == samples[row, slot]


def test_softmax_samples_have_softmax_probabilities():
    probabilities = torch.tensor([0.5, 0, 0.3, 0.19, 0.01, 0])
    count = 40_000
    logits = probabilities.log().expand(count, -1)
    samples = sample_softmax(logits, torch.arange(count), torch.tensor([3, 0]))
    frequencies = torch.bincount(samples, minlength=6) / count
    assert frequencies[1] == frequencies[5] == 0
    assert ((frequencies - probabilities).abs() <= 4 * (probabilities * (1 - probabilities) / count).sqrt()).all()
    part = sample_softmax(logits[:5], torch.arange(30, 35), torch.tensor([3, 0]))
    assert torch.equal(part, samples[30:35])
    assert not torch.equal(samples, sample_softmax(logits, torch.arange(count), torch.tensor([4, 0])))


def test_corruptor_computes_in_fp64(runs, validation_corpus):
    """The division into batches changes rounding errors. A sample changes only if it is closer than these errors."""
    whole = to_torch(next(loader_of(validation_corpus, 32, 6)))
    for source in runs.values():
        with use_impl("reference"):
            model = ef.load(source).model
            together_MD = masked_states(model, whole)
            parts = []
            for row in range(6):
                part = {name: values[row : row + 1] for name, values in whole.items() if name != "cu_seqlens"}
                parts.append(masked_states(model, part | {"cu_seqlens": whole["cu_seqlens"]}))
        is_used_M = whole["masked_weights"].flatten() > 0
        difference_MD = (together_MD - torch.cat(parts))[is_used_M].abs()
        assert together_MD.dtype == torch.float64 and difference_MD.max() < 1e-12

    # The 40th bit of the uniform number can decide between two entries.
    slot = torch.arange(50)
    zero = torch.tensor(0)
    high, low, *_ = philox((zero, slot, zero, torch.tensor(5)), (torch.tensor(9), zero))
    uniform = (high.double() + (low.double() + 0.5) / 2**32) / 2**32
    for distance, expected in ((1e-12, 0), (-1e-12, 1)):
        first = uniform + distance
        logits = torch.stack((first, 1 - first), dim=1).log()
        assert (sample_softmax(logits, slot, torch.tensor([9, 0])) == expected).all()


@pytest.mark.parametrize("source", [pytest.param("modern", marks=pytest.mark.slow), "unigram"])
def test_samples_independent_of_ranks_and_threads(source, runs, validation_corpus):
    corpus = ef.Corpus(validation_corpus)
    corruptor = (
        Corruptor.unigram(corpus, SEED, CPU) if source == "unigram" else Corruptor.load(runs[source], corpus, SEED, CPU)
    )

    def samples_of(world_size, batch_size=12):
        """Returns the samples at used slots, in the order of rows."""
        shards = [
            loader_of(validation_corpus, 32, batch_size, rank=r, world_size=world_size) for r in range(world_size)
        ]
        parts = []
        for number, batches in enumerate(zip(*shards, strict=True)):
            first_row = number * batch_size
            for batch in map(to_torch, batches):
                is_used = batch["masked_weights"] > 0
                parts.append(corruptor.sample(batch, first_row)[is_used])
                first_row += len(is_used)
        return torch.cat(parts)

    alone = samples_of(1)
    assert len(alone) > 500
    assert all(torch.equal(samples_of(*division), alone) for division in [(3,), (1, 7)])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(samples_of(1), alone)
    finally:
        torch.set_num_threads(threads)


def test_same_corruptor_gives_same_text(runs, whole_run, validation_corpus):
    names = ("rows", "tokens", "sequence_length", "corruption", "replaced_fraction")

    def evaluated(model, corruptor, **changes):
        report = evaluate(model, validation_corpus, corrupted_by=corruptor, **changes)
        return tuple(report[name] for name in names)

    first = evaluated(whole_run, runs["google"], batch_size=64)
    assert first == evaluated(runs["modern"], runs["google"], batch_size=37)
    others = evaluated(whole_run, "unigram", sequence_length=32), evaluated(whole_run, runs["modern"])
    assert first[:3] == others[0][:3] == others[1][:3]
    parts = evaluated(whole_run, runs["google"], max_batches=1)
    assert len({text[3] for text in (first, *others, parts)}) == 4


def test_rows_have_corruptor_length_with_warning(runs, whole_run, validation_corpus, capsys):
    few = {"max_batches": 1}
    assert evaluate(whole_run, validation_corpus, corrupted_by=runs["google"], **few)["sequence_length"] == 32
    stderr = capsys.readouterr().err
    assert f"warning: {whole_run}: was trained on rows of 16 tokens and is evaluated on rows of 32" in stderr
    assert "pass --sequence-length 16" in stderr
    assert evaluate(runs["google"], validation_corpus, corrupted_by=whole_run, **few)["sequence_length"] == 16
    assert capsys.readouterr().err == ""
    assert evaluate(runs["google"], validation_corpus, corrupted_by="unigram", **few)["sequence_length"] == 128
    # Rotary positions have no limit.
    report = evaluate(runs["modern"], validation_corpus, corrupted_by="unigram", sequence_length=256, **few)
    assert report["sequence_length"] == 256


def test_discriminator_alone_has_no_generator_metrics(whole_run, exported, validation_corpus):
    corrupted = evaluate(exported / "discriminator", validation_corpus, corrupted_by=whole_run, mlm_examples=3)
    whole = evaluate(exported, validation_corpus, corrupted_by=exported / "generator", sequence_length=16)
    assert all(corrupted[name] == whole[name] for name in ("discriminator_auc", "corruption"))
    assert whole["generator_loss"] > 0
    alone = evaluate(exported / "discriminator", validation_corpus, sequence_length=16)
    assert alone["unigram_auc"] == corrupted["unigram_auc"] and alone["discriminator_auc"] is None
    absent = {"generator_loss", "generator_accuracy", *MLM}
    assert {corrupted[name] for name in absent} == {None} and corrupted["mlm_examples"] == 0


@pytest.mark.slow
def test_every_kind_of_corruptor(whole_run, validation_corpus, tmp_path):
    """The corruptor is a network, or a fixed distribution instead of a generator."""
    texts = set()
    for name in ("mlm", "uniform", "unigram"):
        run = save_run(tmp_path / name, validation_corpus, **VARIANTS[name])
        report = evaluate(whole_run, validation_corpus, corrupted_by=run, max_batches=4)
        texts.add(report["corruption"])
        assert 0.05 < report["replaced_fraction"] < 0.25
    # The run has the token counts of `make_model`, not of the corpus.
    few = {"sequence_length": 16, "max_batches": 4}
    texts.add(evaluate(whole_run, validation_corpus, corrupted_by="unigram", **few)["corruption"])
    assert len(texts) == 4


def test_model_without_usable_generator_refused(whole_run, exported, runs, validation_corpus, tiny_vocab, tmp_path):
    def refused(start, corruptor, model=whole_run, error=ValueError, **changes):
        with pytest.raises(error) as caught:
            evaluate(model, validation_corpus, corrupted_by=corruptor, **changes)
        assert str(caught.value).startswith(start) and "\n" not in str(caught.value)

    lone = exported / "discriminator"
    refused(f"{lone}: has only the discriminator, which cannot corrupt text; pass a ", lone)
    refused(f"{tmp_path / 'nothing'}: no such folder; pass a run", tmp_path / "nothing", error=FileNotFoundError)

    entries = tiny_vocab.read_text().splitlines()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/vocab.txt").write_text("\n".join([*entries[:5], *reversed(entries[5:])]) + "\n")
    other = shutil.copytree(runs["google"], tmp_path / "run")
    shutil.rmtree(other / "tokenizer")
    write_tokenizer(other / "tokenizer", ef.Tokenizer(tmp_path / "other/vocab.txt"), 128)
    refused(f"{other}: cannot corrupt this text: {other / 'tokenizer'}", other)

    unigram = save_run(tmp_path / "unigram", validation_corpus, **VARIANTS["unigram"])
    ef.export(unigram, out=tmp_path / "hf", unfinished=True)
    refused(f"{tmp_path / 'hf'}: a unigram generator's token counts are not exp", tmp_path / "hf")
    # As the evaluated model it works: its discriminator reads any text.
    report = evaluate(tmp_path / "hf", validation_corpus, corrupted_by=unigram, max_batches=1, mlm_examples=1)
    assert report["discriminator_auc"] > 0

    too_long = f"{whole_run}: reads at most 128 tokens, but rows have 256; pass --sequence-length 128 or less"
    refused(too_long, "unigram", sequence_length=256)
    refused(too_long, whole_run, runs["modern"], sequence_length=256)
    refused("mlm_examples = -1: must be 0 (none) or more", "unigram", mlm_examples=-1)

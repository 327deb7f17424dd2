"""A student learns from a teacher: its loss equals a reference; the choice and cache of answers; and errors."""

import contextlib
import json
import signal

import numpy as np
import pytest
import recipe_reference
import torch
import torch.nn.functional as F
import transformers
from test_finetuning_reference import OVERRIDES, READING, Reference, pair_ids, read_pairs
from tiny_reading import tagged_sentences, write_conll
from tiny_task import QUICK, pairs, save_encoder, sentences, write_mrpc, write_stsb

import electra_fast as ef
from electra_fast.cli.parser import build_parser
from electra_fast.errors import InputError, Interrupted
from electra_fast.finetuning.batches import TrainingSet, pack, pack_static, training_order
from electra_fast.finetuning.config import recipe_config
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.finetuned_model import FinetunedModel
from electra_fast.finetuning.readers.words import places_of
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks.task_type import named_split
from electra_fast.finetuning.training import teacher as teaching
from electra_fast.finetuning.training.step import TaskBackward
from electra_fast.finetuning.training.teacher import HuggingFaceModel, Teacher
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.interruption import StopRequest

TAUGHT = {"finetune.teacher_weight": "0.7", "finetune.teacher_temperature": "3"}


def reordered(folder, order):
    """Changes the order of a classifier's classes."""
    table = json.loads((folder / "config.json").read_text())
    labels = [table["id2label"][str(number)] for number in order]
    table["id2label"] = {str(number): label for number, label in enumerate(labels)}
    table["label2id"] = {label: number for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(table))
    tensors = ef.checkpoint.read_tensors(folder / "model.safetensors")
    for name in ("classifier.out_proj.weight", "classifier.out_proj.bias"):
        tensors[name] = tensors[name][list(order)].clone()
    ef.checkpoint.write_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def divergence(student, teacher, temperature):
    """Returns T^2 KL(teacher || student), computed by its definition."""
    p, q = (torch.softmax(outputs / temperature, -1) for outputs in (teacher, student))
    return temperature**2 * (p * (p / q).log()).sum(-1)


def head_of(model):
    return {name: p.detach().clone() for name, p in model.head.items()}


@pytest.mark.parametrize(
    "kind", ["classification", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("regression", "multi-label"))]
)
def test_epoch_with_teacher_equals_reference(tmp_path, tiny_vocab, kind, write_rows):
    """Labeled and unlabeled examples are shuffled together; the loss is weighted by labels and answers."""
    encoder, other = (save_encoder(tmp_path / str(seed), tiny_vocab, seed=seed) for seed in (0, 1))
    arguments = {"overrides": OVERRIDES, "recipe": "fast"}
    if kind == "multi-label":
        texts = [(text,) for text, _ in sentences(27)]
        targets = [[float("value" in text), float("name" in text)] for (text,) in texts]
        labels = [[name for name, y in zip("ab", row_labels, strict=True) if y] for row_labels in targets]
        rows = [{"text": text, "label": row_labels} for (text,), row_labels in zip(texts, labels, strict=True)]
        arguments |= {"task": "classification", "train": write_rows(rows), "dev": write_rows(rows[:9], "dev.jsonl")}
        extra = [(text,) for text, _ in sentences(11, 5)]
    else:
        name = {"classification": "mrpc", "regression": "stsb"}[kind]
        data = (write_mrpc if name == "mrpc" else write_stsb)(tmp_path / name)
        arguments |= {"task": name, "glue": data}
        texts, targets = read_pairs(data / "train.tsv")
        extra = [(a, b) for a, b, _ in pairs(11, 5)]
    columns = ("text",) if kind == "multi-label" else ("sentence1", "sentence2")
    unlabeled = write_rows([dict(zip(columns, text, strict=True)) for text in [*extra, texts[0]]], "unlabeled.jsonl")
    ef.finetune(other, out=tmp_path / "teacher", **arguments)
    name = arguments["task"]
    teacher = tmp_path / "teacher" / name / "seed-0" / "model"
    teacher_model = transformers.AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    if kind == "classification":
        reordered(teacher, (1, 0))  # the outputs of `teacher_model` keep the student's order
    taught = arguments | {"overrides": OVERRIDES | TAUGHT}
    results = ef.finetune(encoder, out=tmp_path / "out", teacher=teacher, unlabeled=unlabeled, **taught)
    assert results[name]["alone"].keys() == results[name]["teacher"].keys()
    exported = tmp_path / "out" / name / "seed-0" / "model"

    config = recipe_config("fast", name, load_encoder(encoder).shape, OVERRIDES).finetune
    model = Reference(encoder, kind, config, 1 if kind == "regression" else 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)

    def ids_of(text):
        if len(text) == 2:
            return pair_ids(tokenizer, text)
        ids = tokenizer.encode(text[0], truncation=True, max_length=24)
        return ids, [0] * len(ids)

    examples = [*texts, *extra]
    logits = []
    for text in examples:
        ids, types = ids_of(text)
        with torch.no_grad():
            logits.append(teacher_model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0])
    scale = 5 if kind == "regression" else 1

    def batch_loss(chosen):
        total = 0.0
        weight = 0.0
        for i in chosen:
            outputs = model.outputs(*ids_of(examples[i]))[0]
            if kind == "regression":
                answer = (outputs - logits[i] / scale).square().sum()
            elif kind == "classification":
                answer = divergence(outputs, logits[i], 3)
            else:
                both = [torch.stack((values, torch.zeros_like(values)), -1) for values in (outputs, logits[i])]
                answer = divergence(*both, 3).mean()
            if i < len(texts):
                y = torch.tensor(targets[i])
                if kind == "regression":
                    label = (outputs[0] - y / scale).square()
                elif kind == "classification":
                    label = F.cross_entropy(outputs, y.long())
                else:
                    label = F.binary_cross_entropy_with_logits(outputs, y)
                answer = 0.3 * label + 0.7 * answer
            total = total + answer
            weight = weight + 1
        return total / weight

    before = head_of(model)
    order = training_order(config, len(examples), seed=0)
    recipe_reference.train(model, batch_loss, order, "fast", config.learning_rate)
    assert all((p - before[name]).abs().max() > 1e-5 for name, p in model.head.items())
    trained_model = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    for text in examples[:8]:
        ids, types = ids_of(text)
        with torch.no_grad():
            outputs = trained_model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
            torch.testing.assert_close(outputs, model.outputs(ids, types)[0] * scale, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_epoch_of_tagging_with_teacher_equals_reference(tmp_path, tiny_vocab, write_rows):
    encoder, other = (save_encoder(tmp_path / str(seed), tiny_vocab, seed=seed) for seed in (0, 1))
    data = write_conll(tmp_path / "data", words=(3, 8))
    arguments = {"task": "tagging", "train": data / "train.conll", "dev": data / "dev.conll"}
    ef.finetune(other, out=tmp_path / "teacher", overrides=READING, **arguments)
    extra = [words for words, _ in tagged_sentences(9, 7, (3, 8))]
    unlabeled = write_rows([{"tokens": words} for words in extra], "unlabeled.jsonl")
    teacher = tmp_path / "teacher/tagging/seed-0/model"
    arguments |= {"teacher": teacher, "unlabeled": unlabeled}
    ef.finetune(encoder, out=tmp_path / "out", overrides=READING | TAUGHT, **arguments)
    folder = tmp_path / "out/tagging/seed-0/model"
    teacher_model = transformers.AutoModelForTokenClassification.from_pretrained(teacher).eval()
    config = recipe_config("fast", "tagging", load_encoder(encoder).shape, READING).finetune
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    labels = json.loads((folder / "config.json").read_text())["label2id"]
    for tokens, tags in [*tagged_sentences(24, 0, (3, 8)), *((words, None) for words in extra)]:
        encoding = tokenizer(tokens, is_split_into_words=True)
        words = encoding.word_ids()
        first = [at for at, word in enumerate(words) if word is not None and word not in words[:at]]
        with torch.no_grad():
            answers = teacher_model(torch.tensor([encoding["input_ids"]])).logits[0, first]
        rows.append((encoding["input_ids"], first, tags and torch.tensor([labels[tag] for tag in tags]), answers))
    model = Reference(encoder, "tagging", config, len(labels))

    def batch_loss(chosen):
        losses = []
        for ids, first, wanted, answers in (rows[i] for i in chosen):
            outputs = model.outputs(ids)[first]
            token_losses = divergence(outputs, answers, 3)
            if wanted is not None:
                token_losses = 0.3 * F.cross_entropy(outputs, wanted, reduction="none") + 0.7 * token_losses
            losses.append(token_losses)
        return torch.cat(losses).mean()

    recipe_reference.train(model, batch_loss, training_order(config, len(rows), 0), "fast", config.learning_rate)
    trained_model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    for ids, _, _, _ in rows:
        with torch.no_grad():
            torch.testing.assert_close(
                trained_model(torch.tensor([ids])).logits[0], model.outputs(ids), rtol=1e-5, atol=1e-5
            )


def test_parts_of_step_and_static_batches_have_equal_gradients(job_of):
    """Processes share a batch in parts, and CUDA graphs read static batches."""
    job = job_of("mrpc")
    answers = np.random.default_rng(0).normal(size=(len(job.examples), 2))
    answers[3] = np.nan
    training_set = job.training_set.taught(np.concatenate((answers, answers)), job.training_set, 0.9)
    chosen = np.array([0, 3, 5, 9, 20, 30])
    model = job.work.model()
    gradients = []
    model.load_encoder(job.encoder.state)
    model.initialize_head(0)
    encoded = training_set.encoded
    for packed in (pack(encoded, chosen), pack(encoded, chosen, 3), [pack_static(encoded, chosen, 24, 8)]):
        model.zero_grad()
        for number in range(len(packed)):
            backward = TaskBackward(model, job.work.compute, number)
            backward.load(training_set.batch(packed, chosen, "mean", 0), 0)
            backward.run()
        gradients.append(torch.cat([p.grad.to_dense().flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_weights_of_labels_and_answers():
    ids = np.zeros(12, np.int32)
    encoded = EncodedExamples(ids, ids, np.arange(5) * 3, 0, (1,))
    labeled = TrainingSet(encoded, np.array([0, 1, 0, 1]), np.array([1.0, 3, 1, 3]))
    answers = np.ones((8, 2))
    answers[2] = np.nan
    taught = labeled.taught(answers, labeled, 0.75)
    np.testing.assert_allclose(
        taught.weights, [[0.25, 0.75, 0.25, 0.75, 0, 0, 0, 0], [0.75, 0.75, 0, 0.75, 1, 1, 1, 1]]
    )
    assert taught.encoded.empty == (1, 5) and taught.encoded.offsets.tolist() == list(range(0, 25, 3))
    assert not np.isnan(taught.answers).any()


@pytest.fixture(scope="module")
def classifier(finetuned):
    return finetuned[0] / "sst2/seed-0/model"


def test_teacher_labels_are_matched_by_name(classifier, tmp_path, glue_folder):
    task = read_tasks("sst2", glue=glue_folder)[0].task
    names = {"same": ("0", "1"), "other order": ("1", "0"), "default": ("LABEL_0", "LABEL_1")}
    teacher = Teacher(classifier, tmp_path / "kept", torch.device("cpu"))
    orders = {}
    for name, labels in names.items():
        teacher.labels = labels
        orders[name] = teacher.check(task, 1)
        assert bool(teacher.notes) == (name == "default")
    assert orders == {"same": [0, 1], "other order": [1, 0], "default": [0, 1]}
    teacher.labels = ("0", "positive", "neutral")
    with pytest.raises(InputError, match=r"other classes \(missing '1', additional 'positive', 'neutral'\)"):
        teacher.check(task, 1)


def test_answers_are_cached_and_survive_kill(classifier, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(teaching, "BLOCK", 4)
    split = named_split([(text,) for text, _ in sentences(11)])
    expected = FinetunedModel(classifier, precision="fp32").outputs_of(split)
    requests = []

    class Counting:
        kind = "classification"
        labels = ("0", "1")
        num_texts = 1
        limit = 2

        def outputs_of(self, part):
            if len(requests) == self.limit:
                raise KeyboardInterrupt
            requests.append([text for (text,) in part.texts])
            return expected[[split.texts.index(text) for text in part.texts]]

    monkeypatch.setattr(teaching, "_read", lambda *_: Counting())
    with pytest.raises(KeyboardInterrupt):
        Teacher(classifier, tmp_path, torch.device("cpu")).outputs(split)
    assert [*map(len, requests)] == [4, 4]
    Counting.limit = 100
    outputs = Teacher(classifier, tmp_path, torch.device("cpu")).outputs(split)
    np.testing.assert_array_equal(outputs, expected)
    assert [*map(len, requests)] == [4, 4, 3]
    block = sorted(tmp_path.rglob("*.npz"))[0]
    block.write_bytes(block.read_bytes()[:-40])
    again = Teacher(classifier, tmp_path, torch.device("cpu"))
    np.testing.assert_array_equal(again.outputs(split), expected)
    assert len(requests) == 4 and "damaged; computing its answers again" in capsys.readouterr().err
    stopped = contextlib.nullcontext(StopRequest(signal.SIGTERM))
    monkeypatch.setattr(teaching, "stop_requests", lambda: stopped)
    with pytest.raises(Interrupted, match="11 answers of the teacher; run again to resume"):
        again.outputs(named_split([("another text",)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unlabeled": "u.tsv"}, "--unlabeled: needs --teacher"),
        ({"overrides": QUICK | {"finetune.teacher_weight": "0.5"}}, "--finetune.teacher_weight: needs --teacher"),
        ({"teacher": "encoder"}, "has no task head, so it cannot label examples"),
        ({"teacher": "missing"}, "no such folder"),
        ({"teacher": "sst2", "task": "mrpc"}, "reads single texts, but the examples are pairs"),
        ({"teacher": "sst2", "task": None}, "is for a single task; choose it with --task"),
        ({"teacher": "sst2", "unlabeled": "empty.tsv"}, "empty"),
    ],
)
def test_unusable_teacher_is_refused_in_one_line(finetuned, encoder_folder, glue_folder, tmp_path, change, message):
    places = {"sst2": finetuned[0] / "sst2/seed-0/model", "encoder": encoder_folder, "missing": tmp_path / "missing"}
    (tmp_path / "empty.tsv").write_text("")
    arguments = {"task": "sst2", "glue": glue_folder, "overrides": QUICK} | change
    if "teacher" in change:
        arguments["teacher"] = places[change["teacher"]]
    if "unlabeled" in change:
        arguments["unlabeled"] = tmp_path / change["unlabeled"]
    with pytest.raises((InputError, FileNotFoundError), match=message) as error:
        ef.finetune(encoder_folder, out=tmp_path / "out", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ending", ["QuestionAnswering", "Model"])
def test_transformers_model_without_task_head_is_refused(tmp_path, ending):
    """Loading it in a class with another head would give random weights."""
    name = "BertModel" if ending == "Model" else f"BertFor{ending}"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [name]}))
    with pytest.raises(InputError, match="fine-tune (it|this encoder)"):
        Teacher(tmp_path, tmp_path / "kept", torch.device("cpu"))


def test_unlabeled_option_takes_several_files():
    words = ["finetune", "run", "--unlabeled", "a.tsv", "b.csv", "--out", "out", "--unlabeled=c.txt"]
    options = build_parser().parse(words)
    assert [*map(str, options.unlabeled)] == ["a.tsv", "b.csv", "c.txt"] and str(options.model) == "run"


def test_question_answering_refuses_teacher(classifier, encoder_folder, squad_folder, tmp_path):
    with pytest.raises(InputError, match="--teacher: not supported for question-answering"):
        ef.finetune(encoder_folder, task="squad1", squad=squad_folder, out=tmp_path, teacher=classifier)


@pytest.mark.slow
def test_teacher_combines_with_other_options(classifier, encoder_folder, tmp_path, write_rows):
    """Folds, untrained baselines, class weights, calibration, texts in memory; a second call trains nothing."""
    rows = [{"text": text, "label": str(label)} for text, label in sentences(40)]
    extra = [{"text": text, "label": "unknown"} for text, _ in [*sentences(12, 3), *sentences(2)]]
    arguments = {"task": "classification", "train": write_rows(rows), "folds": 2, "untrained_twin": True, "seeds": 2}
    arguments |= {"teacher": classifier, "unlabeled": [extra[:5], extra[5:]], "out": tmp_path / "out"}
    arguments["overrides"] = QUICK | {"finetune.class_weights": "balanced", "finetune.calibrate": True}
    first = ef.finetune(encoder_folder, **arguments)["classification"]
    assert (tmp_path / "out/classification/fold-1/alone/seed-1/result.json").exists()
    assert {"alone", "teacher", "untrained", "seconds_per_thousand"} <= first.keys() and len(first["runs"]) == 4
    assert ef.finetune(encoder_folder, **arguments)["classification"] == first
    assert "teacher" in (tmp_path / "out/classification/report.md").read_text()
    with pytest.raises(InputError, match="was trained with other unlabeled examples"):
        ef.finetune(encoder_folder, **arguments | {"unlabeled": extra[:5]})
    with pytest.raises(InputError, match="was trained with a teacher"):
        ef.finetune(encoder_folder, **{k: v for k, v in arguments.items() if k not in ("teacher", "unlabeled")})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
@pytest.mark.parametrize("ending", ["SequenceClassification", "TokenClassification"])
def test_transformers_teacher_equals_transformers(tmp_path, tiny_vocab, family, ending):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    if family == "DistilBert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    words = tiny_vocab.read_text().splitlines()
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(words), max_position_embeddings=40, pad_token_id=0, num_labels=3, **sizes
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}For{ending}")(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(tiny_vocab), model_max_length=10**30)
    tokenizer.save_pretrained(tmp_path)
    teacher = HuggingFaceModel(tmp_path, torch.device("cpu"))
    texts = [text for text, _ in sentences(6)] + ["name " * 100]
    length = 39 if family == "Roberta" else 40
    if ending == "SequenceClassification":
        split = named_split([(text,) for text in texts])
        for text, outputs in zip(texts, teacher.outputs_of(split), strict=True):
            with torch.no_grad():
                inputs = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
                inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
                torch.testing.assert_close(torch.tensor(outputs), model(**inputs).logits[0], rtol=1e-4, atol=1e-4)
        assert teacher.kind == "classification"
        return
    assert teacher.kind == "tagging"
    words = [places_of(text.split()) for text in texts]
    split = named_split([(text,) for text in texts], words=words)
    answers = iter(teacher.outputs_of(split))
    for text in texts:
        encoding = tokenizer(
            text.split(), is_split_into_words=True, truncation=True, max_length=length, return_tensors="pt"
        )
        with torch.no_grad():
            logits = model(input_ids=encoding["input_ids"]).logits[0]
        places = encoding.word_ids()
        for number in range(len(text.split())):
            outputs = torch.tensor(next(answers))
            if number in places:
                torch.testing.assert_close(outputs, logits[places.index(number)], rtol=1e-4, atol=1e-4)
            else:
                assert outputs.isnan().all()

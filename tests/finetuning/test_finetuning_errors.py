"""Errors of `finetune` are one line with a remedy, and no file is lost."""

import json
import os
import re
import shutil

import in_process
import pytest
import torch
from tiny_reading import flags, write_squad
from tiny_task import QUICK, save_encoder, sentences, write_sst2

import electra_fast as ef
from electra_fast.errors import InputError, TrainingFailed
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.training.run import exclusive


def test_resume_with_other_settings_data_or_encoder_is_refused(
    finetuned, encoder_folder, glue_folder, tmp_path, tiny_vocab
):
    out = shutil.copytree(finetuned[0], tmp_path / "copy")
    with pytest.raises(
        InputError, match=r"sst2: was trained with other settings \(finetune.epochs was 1.0 and is now 2"
    ):
        ef.finetune(encoder_folder, task="sst2", glue=glue_folder, out=out, overrides=QUICK | {"finetune.epochs": "2"})
    other = save_encoder(tmp_path / "other", tiny_vocab, seed=1)
    with pytest.raises(InputError, match="sst2: was trained from another encoder; use the same value"):
        ef.finetune(other, task="sst2", glue=glue_folder, out=out, overrides=QUICK)
    renamed = shutil.copytree(encoder_folder, tmp_path / "renamed")
    words = (renamed / "vocab.txt").read_text().splitlines()
    (renamed / "vocab.txt").write_text("\n".join([*words[:5], *reversed(words[5:])]) + "\n")
    with pytest.raises(InputError, match="was trained with another tokenizer"):
        ef.finetune(renamed, task="sst2", glue=glue_folder, out=out, overrides=QUICK)
    train = write_sst2(tmp_path / "data") / "train.tsv"
    train.write_text(train.read_text().replace("\t1\n", "\t0\n", 1))  # changes one label, and no text
    with pytest.raises(InputError, match="was trained with other examples of train"):
        ef.finetune(encoder_folder, task="sst2", glue=tmp_path / "data", out=out, overrides=QUICK)


def test_collapse_is_reported(encoder_folder, tmp_path):
    data = write_sst2(tmp_path / "data", train=16)
    lines = [f"{text}\t1" for text, _ in sentences(40)] + ["a false name\t0"]
    (data / "train.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    overrides = QUICK | {"finetune.epochs": "4", "finetune.learning_rate": "1e-3"}
    run = in_process.run(
        *("finetune", encoder_folder, "--task", "sst2", "--glue", data, "--out", tmp_path / "out"), *flags(overrides)
    )
    assert run.returncode == 0
    assert "are the class '1'" in run.stderr and "finetune.learning_rate" in run.stderr
    assert "warning" in json.loads((tmp_path / "out" / "results.json").read_text())["sst2"]["runs"][0]


def test_non_finite_loss_or_gradient_stops_training(encoder_folder, glue_folder, tmp_path, monkeypatch):
    """After the last step, no loss would reveal a bad gradient."""
    options = {"model": encoder_folder, "glue": glue_folder, "out": tmp_path}
    with pytest.raises(TrainingFailed, match=r"seed-0: the loss .* became NaN .* lower finetune.learning_rate"):
        ef.finetune(task="sst2", **options, overrides=QUICK | {"finetune.learning_rate": "1e30"})
    take = FinetuneStep.__call__
    monkeypatch.setattr(FinetuneStep, "__call__", lambda *arguments: (take(*arguments)[0], torch.tensor(torch.inf)))
    with pytest.raises(TrainingFailed, match=r"seed-0: .* gradient became NaN or infinite"):
        ef.finetune(task="mrpc", **options, overrides=QUICK)
    assert not list(tmp_path.rglob("model"))


# Further arguments of `finetune MODEL --out OUT`; ./glue has GLUE tasks, and ./both two versions of SQuAD.
MISTAKES = {
    "": "finetune needs --glue DIR or --squad DIR, or --train FILE with --task classification, regression, tagging",
    "--task tagging": "--task tagging needs --train FILE",
    "--task sst2": "--task sst2 needs --glue DIR",
    "--task glue --glue glue": "without --task, --glue DIR uses all tasks in DIR",
    "--task squad --glue glue": "unknown task 'squad'; did you mean squad",
    "--task squad1 --glue glue": "--task squad1 needs --squad DIR, not --glue DIR",
    "--task , --glue glue": "--task: names no task; must be one of cola, sst2",
    "--task sst2,classification --glue glue": "--task classification needs --train FILE, not --glue DIR",
    "--task qnli --glue glue": "in this folder or in QNLI/",
    "--task sst2 --glue glue --recipe fasst": "unknown recipe 'fasst'; did you mean fast",
    "--task sst2 --glue glue --seeds 0": "seeds = 0",
    "--task sst2 --glue glue --finetune.both_orders true": "needs pairs of texts",
    "--task sst2 --glue glue --finetune.class_weights 0=1,2=3": "'2=3' must be LABEL=WEIGHT",
    "--task sst2 --glue glue --finetune.class_weights 0=0,1=0": "no training example has a weight above 0",
    "--task sst2 --glue glue --finetune.execution graph": "needs a CUDA device",
    "--task sst2 --glue glue --finetune.batch_size 1000000000000": "at most 65536",
    "--task sst2 --glue glue --train x.tsv": "--glue DIR and --train FILE: cannot be combined",
    "--task sst2 --glue glue --scheme IO": "--scheme: is for --train with --task tagging",
    "--glue glue --split-seed 1": "--split-seed: is for --train with",
    "--glue glue --device gpu": "device = 'gpu': must be auto, cpu, cuda or cuda:N",
    "--glue .": "contains no folder of a GLUE task",
    "--glue glue --squad squad": "--glue DIR and --squad DIR: cannot be combined",
    "--squad both": "both: contains squad1 and squad2; choose with --task squad1 or --task squad2",
    "--squad glue": "glue: no train*.json of SQuAD in this folder",
    "--train x.csv": "--train needs one task: --task classification, ",
    "--train x.csv --task tagging,regression": "--train needs one task",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_input_error_is_one_line(encoder_folder, glue_folder, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glue").symlink_to(glue_folder)
    for version in (1, 2):
        write_squad(tmp_path / "both", version)
    run = in_process.run("finetune", encoder_folder, "--out", tmp_path / "out", *words.split())
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1
    assert MISTAKES[words] in run.stderr


def test_class_settings_are_refused_for_other_tasks(encoder_folder, tmp_path):
    values = [{"text": f"b {number}", "score": number} for number in range(8)]
    questions = [{"question": f"b {number}", "context": "b", "answers": "b"} for number in range(8)]
    for task, rows in {"regression": values, "question-answering": questions}.items():
        for key, value in {"class_weights": "balanced", "calibrate": True}.items():
            overrides = QUICK | {f"finetune.{key}": value}
            with pytest.raises(InputError, match=f"finetune.{key} = .*: needs classes, which {task} does not have"):
                ef.finetune(encoder_folder, task=task, train=rows[:4], dev=rows[4:], out=tmp_path, overrides=overrides)


def test_foreign_folder_is_not_changed(whole_run, encoder_folder, glue_folder, tmp_path):
    run = shutil.copytree(whole_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with exclusive(tmp_path), pytest.raises(InputError, match="another process is training in this folder"):
        ef.finetune(encoder_folder, task="sst2", glue=glue_folder, out=tmp_path, overrides=QUICK)
    with pytest.raises(InputError, match="is not a fine-tuning folder; choose another --out"):
        ef.finetune(run, task="sst2", glue=glue_folder, out=run, overrides=QUICK)
    (tmp_path / "mine" / "sst2").mkdir(parents=True)
    (tmp_path / "mine" / "config.toml").write_text("[finetune]\n")
    (tmp_path / "mine" / "sst2" / "precious").write_text("x")
    with pytest.raises(InputError, match="task.json: missing, but the folder has other files"):
        ef.finetune(run, task="sst2", glue=glue_folder, out=tmp_path / "mine", overrides=QUICK)
    assert before == {path: path.read_bytes() for path in before}


@pytest.fixture
def stopped(encoder_folder, glue_folder, tmp_path):
    """A seed that was stopped after its third step, with the checkpoints of the last two steps."""
    out = tmp_path / "stopped"
    original = os.replace

    def replace(source, target):
        original(source, target)
        if target.name == "step-3":
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        overrides = QUICK | {"finetune.checkpoint_seconds": "0"}
        ef.finetune(encoder_folder, task="sst2", glue=glue_folder, out=out, overrides=overrides)
    return out


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def resumed(out, encoder_folder, glue_folder):
    arguments = ("finetune", encoder_folder, "--task", "sst2", "--glue", glue_folder, "--out", out)
    return in_process.run(*arguments, *flags(QUICK))


def test_damaged_checkpoint_falls_back_to_previous(stopped, finetuned, encoder_folder, glue_folder, tmp_path):
    for damaged in ("model.safetensors", "optimizer.safetensors", "state.json"):
        out = shutil.copytree(stopped, tmp_path / damaged)
        seed = out / "sst2" / "seed-0"
        other = finetuned[0] / "sst2" / "seed-0"
        flip_a_bit(seed / "checkpoints" / "step-3" / damaged)
        run = resumed(out, encoder_folder, glue_folder)
        assert run.returncode == 0
        (warning,) = [line for line in run.stderr.splitlines() if "warning: " in line]
        assert f"step-3/{damaged}: damaged " in warning and "resumes at step 2" in run.stderr
        for name in ("model/model.safetensors", "predictions.dev.tsv"):
            assert (seed / name).read_bytes() == (other / name).read_bytes()
        assert not (seed / "checkpoints").exists()
    for path in stopped.rglob("model.safetensors"):
        flip_a_bit(path)
    run = resumed(stopped, encoder_folder, glue_folder)
    assert run.returncode == 2
    assert re.search("no intact checkpoint: .* remove .*seed-0 to train this seed again", run.stderr.splitlines()[-1])
    assert not list(stopped.rglob("damaged-*"))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("results.json", lambda path: path.write_text("[]"), "results.json: not a JSON object; remove the file"),
        ("sst2/seed-0/result.json", lambda path: path.write_text("{}"), "incomplete"),
        ("sst2/seed-0/result.json", flip_a_bit, "result.json: (damaged|not a JSON)"),
        ("sst2/seed-0/predictions.dev.tsv", flip_a_bit, "dev.tsv: damaged"),
        ("sst2/seed-0/model/model.safetensors", flip_a_bit, "model.safetensors: damaged"),
        ("sst2/seed-0/model/config.json", lambda path: path.unlink(), "incomplete"),
    ],
)
def test_damage_is_reported_with_remedy(finetuned, encoder_folder, glue_folder, tmp_path, name, damage, message):
    out = shutil.copytree(finetuned[0], tmp_path / "out")
    damage(out / name)
    run = resumed(out, encoder_folder, glue_folder)
    remedy = "; remove .*seed-0 to train this seed again" if "seed-0" in name else ""
    assert run.returncode == 2 and re.search(f"{message}.*{remedy}", run.stderr)


def test_model_and_keys_are_checked_before_data(encoder_folder, tmp_path):
    arguments = {"task": "classification", "train": tmp_path / "missing.csv", "out": tmp_path / "out"}
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        ef.finetune(model=tmp_path / "nowhere", **arguments)
    (tmp_path / "config.json").write_text('{"model_type": "deberta"}')
    with pytest.raises(InputError, match=r"model_type = 'deberta' \(DeBERTa V1\): must be deberta-v2"):
        ef.finetune(model=tmp_path, **arguments)
    with pytest.raises(InputError, match="finetune.epochs has two values"):
        ef.finetune(encoder_folder, **arguments, epochs=1, overrides={"finetune.epochs": 2})
    for key, value in (("finetune.epoch", 3), ("finetune.epochs", -1), ("finetune.sequence_length", 1000)):
        with pytest.raises(InputError, match=key):
            ef.finetune(model=encoder_folder, overrides={key: value}, **arguments)


def test_task_is_inferred_from_folder(tmp_path):
    assert [data.task.name for data in read_tasks(None, squad=write_squad(tmp_path / "squad", 2))] == ["squad2"]
    assert [data.task.name for data in read_tasks(None, glue=write_sst2(tmp_path / "SST-2"))] == ["sst2"]

"""Fixtures for tests of fine-tuning."""

import pytest
import torch
from tiny_reading import SETTINGS
from tiny_task import NO_DROPOUT, QUICK, write_stsb

from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.training.job import make_job
from electra_fast.huggingface.encoder import load_encoder


@pytest.fixture
def task_files(glue_folder, squad_folder, conll_folder, tmp_path):
    """A function that returns a task's files as arguments of `finetune`."""

    def task_files(task):
        if task == "tagging":
            return {"train": conll_folder / "train.conll", "dev": conll_folder / "dev.conll"}
        if task == "stsb":
            write_stsb(tmp_path / "STS-B")
        glue = {"stsb": tmp_path, "mrpc": glue_folder}.get(task)
        return {"glue": glue} if glue else {"squad": squad_folder}

    return task_files


@pytest.fixture
def job_of(encoder_folder, task_files, tmp_path):
    """A function that makes a task's job without dropout."""

    def job_of(task, encoder=None, device="cpu", **changes):
        files = task_files(task)
        folders = {name: files.pop(name) for name in ("glue", "squad") if name in files}
        (data,) = read_tasks(task, **folders, files=files)
        settings = QUICK if task in ("mrpc", "stsb") else SETTINGS
        config = FinetuningConfig().override(settings | NO_DROPOUT | changes)
        return make_job(data, config, encoder or load_encoder(encoder_folder), tmp_path, torch.device(device))

    return job_of

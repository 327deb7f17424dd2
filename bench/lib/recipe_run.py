"""One run of `recipes.py` in a separate process: pre-training, evaluation on fixed corruptions, fine-tuning.

`python -m lib.recipe_run FOLDER`, in bench/, executes FOLDER/run.json, resumes after an interruption, and writes
FOLDER/result.json.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.data.corpus import write_tokenizer
from electra_fast.data.mixture import Mixture
from electra_fast.errors import Diverged, ElectraFastError
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import replace_file
from electra_fast.interruption import interrupt_at_once, stop_with_parent
from electra_fast.messages import error_line, say
from electra_fast.training import evaluate as evaluation
from electra_fast.training.corruptor import UNIGRAM_LENGTH, Corruptor
from lib import recipe_trainer
from lib.rotary_bert import use_rotary_positions

RUN = "run.json"
CONFIG = "config.toml"
RESULT = "result.json"
SECONDS = "seconds.txt"
EVAL_ROWS = 64
"""Rows per batch of an evaluation."""
PATCHES = {"rotary-positions": use_rotary_positions}
"""Changes to the recipe that are not in the package; each replaces functions in this process."""
JUDGED = ("discriminator_auc", "discriminator_loss", "generator_loss", "generator_accuracy", "corruption", "tokens")


@dataclass(frozen=True)
class Replacements:
    """A masked language model's tokens in the validation text, stored since its training depends on the processor."""

    samples_RN: torch.Tensor
    sequence_length = UNIGRAM_LENGTH
    max_positions = None

    def sample(self, batch: Mapping[str, torch.Tensor], first_row: int) -> torch.Tensor:
        return self.samples_RN[first_row : first_row + len(batch["masked_ids"])]


def load_corruptor(source: str | Path, corpus: str | Path) -> Corruptor | Replacements:
    if str(source).endswith(".npz"):
        return Replacements(torch.from_numpy(np.load(source)["samples"].astype(np.int64)))
    return evaluation._corruptor(source, Mixture(str(corpus)), torch.device("cpu"))


def do(folder: Path) -> dict[str, Any]:
    job = json.loads((folder / RUN).read_text())
    config = ef.Config.load(folder / CONFIG)
    num_steps = job["num_steps"]
    run = folder / "run"
    loaded = {source: load_corruptor(source, job["validation"]) for source in job["corruptors"].values()}
    evaluation._corruptor = lambda source, *_: loaded[str(source)]  # a corruptor keeps its own encoder
    for name in job["patches"]:
        PATCHES[name]()
    before = sum(os.times()[:4])
    try:
        if job["trainer"]:
            recipe_trainer.train(job["trainer"], config, num_steps, job["corpus"], run)
        elif num_steps:
            ef.pretrain(job["corpus"], config=config, out=run)
        else:
            _write_untrained(config, job["corpus"], run)
    except Diverged as error:
        return {"failed": str(error)}
    finally:
        with (folder / SECONDS).open("a") as file:
            file.write(f"{sum(os.times()[:4]) - before}\n")
    result: dict[str, Any] = {
        # CPU time, which other processes disturb less than the clock; sessions that were killed are not counted.
        "seconds": round(sum(map(float, (folder / SECONDS).read_text().split())), 1),
        "tokens": num_steps * config.train.batch_size * config.data.sequence_length,
        "corrupted_by": {},
    }
    model = run / "model" if job["trainer"] else run
    for name, corruptor in job["corruptors"].items():
        report = evaluation.evaluate(
            model,
            job["validation"],
            sequence_length=job["sequence_length"],
            batch_size=EVAL_ROWS,
            max_batches=job["eval_batches"],
            corrupted_by=corruptor,
            mlm_examples=0,
        )
        result["corrupted_by"][name] = {key: report[key] for key in JUDGED}
    if job["glue"]:
        data, name, num_seeds = job["glue"]
        fixed = {"finetune.epochs": 3, "finetune.select": "last"}  # as in the earlier lines of recipes.jsonl
        tasks = ef.finetune(model, glue=data, out=folder / "tasks" / name, seeds=num_seeds, overrides=fixed)
        result |= {"tasks": {name: scores["median"] for name, scores in tasks.items()}, "tasks_of": name}
    return result


def _write_untrained(config: ef.Config, corpus: str, run: Path) -> None:
    write_tokenizer(run / "tokenizer", ef.Tokenizer.of(ef.Corpus(corpus)), config.model.max_positions)
    replace_file(run / "config.toml", config.to_toml())
    checkpoint.save(run, ef.Electra(config), None, checkpoint_folder.TrainState(), keep=1)


def main(folder: Path) -> int:
    """Writes the measurements; returns the exit code."""
    interrupt_at_once()
    stop_with_parent()
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a process whose parent was killed may still be writing its checkpoint
            replace_file(folder / RESULT, json.dumps(do(folder), indent=2) + "\n")
    except KeyboardInterrupt as interruption:
        return 128 + getattr(interruption, "signal", 2)
    except (ElectraFastError, OSError) as error:
        say(f"error: {error_line(str(error))}")
        return 2
    shutil.rmtree(folder / "tasks", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

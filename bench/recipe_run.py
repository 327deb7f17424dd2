"""One run of `recipes.py` in a process of its own: pre-training, evaluation on fixed corruptions, fine-tuning.

    python bench/recipe_run.py FOLDER

does what FOLDER/run.json says, resumes where it was stopped, and leaves FOLDER/result.json.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import recipe_patches
import torch

import electra_fast as ef
from electra_fast.atomic_files import replace_file
from electra_fast.data.mixture import Mixture
from electra_fast.errors import Diverged
from electra_fast.interruption import interrupt_at_once
from electra_fast.reproduction.row_run import end_with_parent
from electra_fast.training import evaluate as evaluation

RUN, RESULT, SECONDS = "run.json", "result.json", "seconds.txt"
JUDGED = ("discriminator_auc", "discriminator_loss", "generator_loss", "generator_accuracy", "corruption", "tokens")


def do(folder: Path) -> dict[str, Any]:
    """Trains, evaluates and fine-tunes; what was measured."""
    work = json.loads((folder / RUN).read_text())
    config, run, start = ef.Config.load(folder / "config.toml"), folder / "run", time.monotonic()
    mixture, device = Mixture(work["corpus"]), torch.device("cpu")
    loaded = {source: evaluation._corruptor(source, mixture, device) for source in work["corruptors"].values()}
    evaluation._corruptor = lambda source, *_: loaded[str(source)]  # patches must not change a corruptor
    recipe_patches.apply(work["patches"], config)
    before = time.process_time()
    try:
        ef.pretrain(config, data=work["corpus"], out=run)
    except Diverged as error:
        return {"failed": str(error)}
    finally:
        with (folder / SECONDS).open("a") as file:
            file.write(f"{time.process_time() - before}\n")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    found: dict[str, Any] = {
        # Of the processor, which other processes disturb less than the clock; of all sessions but killed ones.
        "seconds": round(sum(map(float, (folder / SECONDS).read_text().split())), 1),
        "tokens": last["tokens"],
        "own_discriminator_loss": last["discriminator_loss"],
        "corrupted_by": {},
    }
    for name, corruptor in work["corruptors"].items():
        report = evaluation.evaluate(
            run,
            work["corpus"],
            sequence_length=work["sequence_length"],
            batch_size=64,
            max_batches=work["eval_batches"],
            corrupted_by=corruptor,
            mlm_examples=0,
        )
        found["corrupted_by"][name] = {key: report[key] for key in JUDGED}
    if work["glue"]:
        tasks = ef.finetune("glue", model=run, data=work["glue"], out=folder / "tasks", seeds=work["finetune_seeds"])
        found["tasks"] = {name: each["median"] for name, each in tasks.items()}
        shutil.rmtree(folder / "tasks")
    found["all_seconds"] = round(time.monotonic() - start, 1)
    return found


def main(folder: Path) -> int:
    """The process; returns its exit code."""
    interrupt_at_once()
    end_with_parent()
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one whose parent was killed may still be writing its checkpoint
            replace_file(folder / RESULT, json.dumps(do(folder), indent=2) + "\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

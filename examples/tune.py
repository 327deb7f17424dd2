"""Searches for settings of a fine-tuning with Optuna: learning rate, epochs and batch size.

Needs `pip install optuna`, a run or an exported encoder, and a file of labeled texts (docs/fine-tuning.md):

    python examples/tune.py run reviews.csv tuning/ 20

tries 20 settings, each with up to three seeds; settings whose first seeds are below the median of the others are given
up. The same command continues after a kill, and a larger number adds trials. The score of the best one is flattered by
the choice: score its settings once more on texts that were not used here (`--test` of `electra-fast finetune`).
"""

import sys
from pathlib import Path

import optuna

import electra_fast as ef

model, train, out, num_trials = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])


def score(trial):
    """Returns the median validation score of a trial's settings."""
    settings = {
        "finetune.learning_rate": trial.suggest_float("learning_rate", 3e-5, 1e-3, log=True),
        "finetune.epochs": trial.suggest_int("epochs", 1, 5),
        "finetune.batch_size": trial.suggest_categorical("batch_size", [16, 32, 64]),
    }
    folder = out / f"trial-{trial.number}"
    for seeds in (1, 2, 3):  # in the same folder, so that each call trains one seed more
        results = ef.finetune("classification", model=model, train=train, out=folder, seeds=seeds, overrides=settings)
        median = results["classification"]["median"]
        trial.report(median, seeds)
        if trial.should_prune():
            raise optuna.TrialPruned
    return median


out.mkdir(parents=True, exist_ok=True)
storage = f"sqlite:///{out / 'study.db'}"
study = optuna.create_study(study_name="finetune", storage=storage, direction="maximize", load_if_exists=True)
finished = [trial for trial in study.trials if trial.state.is_finished()]  # a killed trial stays unfinished
study.optimize(score, n_trials=max(0, num_trials - len(finished)))
print(f"best of {len(study.trials)} trials: {study.best_value:.3f}, {study.best_params}")

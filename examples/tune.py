"""Searches for settings of a fine-tuning with Optuna: learning rate, layer decay and batch size.

Needs `pip install optuna`, a run or an exported encoder, and a file of labeled texts (docs/reference/fine-tuning.md):

    python examples/tune.py run reviews.csv tuning/ 20

tries 20 settings with three seeds each, and stops a setting early if its validation scores fall below the median of the
others at the same epoch. The same command resumes after an interruption, and a larger number adds trials. The best
score is optimistic, because it was selected: evaluate its settings on texts that were not used here (`--test` of
`electra-fast finetune`).
"""

import itertools
import sys
from pathlib import Path

import optuna

import electra_fast as ef

model = sys.argv[1]
train = sys.argv[2]
out = Path(sys.argv[3])
num_trials = int(sys.argv[4])


def score(trial):
    """Returns the median validation score of a trial's settings."""
    settings = {
        "finetune.learning_rate": trial.suggest_float("learning_rate", 3e-5, 1e-3, log=True),
        "finetune.layer_decay": trial.suggest_float("layer_decay", 0.7, 1.0),
        "finetune.batch_size": trial.suggest_categorical("batch_size", [16, 32, 64]),
    }
    evaluations = itertools.count()

    def prune(record):  # after each epoch of each seed
        trial.report(record["accuracy"], next(evaluations))
        if trial.should_prune():
            raise ef.StopTraining

    folder = out / f"trial-{trial.number}"
    arguments = {"task": "classification", "train": train, "out": folder, "seeds": 3, "overrides": settings}
    try:
        return ef.finetune(model, **arguments, on_evaluation=prune)["classification"]["median"]
    except ef.StopTraining:
        raise optuna.TrialPruned from None


out.mkdir(parents=True, exist_ok=True)
storage = f"sqlite:///{out / 'study.db'}"
study = optuna.create_study(study_name="finetune", storage=storage, direction="maximize", load_if_exists=True)
finished = [trial for trial in study.trials if trial.state.is_finished()]  # a killed trial stays unfinished
study.optimize(score, n_trials=max(0, num_trials - len(finished)))
print(f"best of {len(study.trials)} trials: {study.best_value:.3f}, {study.best_params}")

"""Validation metrics of a model: losses, accuracies, and the discriminator's AUC."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from electra_fast.compute import ComputeConfig, RngKey, choose_device
from electra_fast.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.errors import InputError
from electra_fast.huggingface.export import load
from electra_fast.huggingface.source import origin, tokenizer_folder
from electra_fast.huggingface.tokenizer import check_vocabulary
from electra_fast.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Number, Objective
from electra_fast.training import metrics

# Masks and samples of an evaluation come from this seed, whatever the run's own.
SEED = 20_190_925


def evaluate(
    source: str | Path,
    data: str | Path,
    *,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    max_batches: int = 0,
    device: str | None = None,
) -> dict[str, Number]:
    """Validation metrics of a run, a checkpoint or an exported folder.

    Args:
        source: run, checkpoint or Hugging Face folder.
        data: corpus; its validation part (`prepare --holdout`) where it has one, else all of it.
        sequence_length: tokens per row; the run's own by default.
        batch_size: rows per batch; the run's own by default.
        max_batches: stop after so many; 0 for one whole pass.
        device: e.g. "cpu"; CUDA where there is one by default.

    Returns:
        `discriminator_auc` and the means of `metrics.jsonl`, and the `rows` and `tokens` they are over. A warning says
        where the corpus is all that the model was trained on.

    Raises FileNotFoundError or ValueError where a folder is missing or not of the expected kind, or where
    the corpus was prepared with another vocabulary than the model's.
    """
    model = load(source).to(torch.device(device) if device else choose_device())
    corpus = Corpus(data)
    if corpus.holdout is not None:
        corpus = Corpus(corpus.holdout)
    elif origin(Path(source)).corpus == corpus.content_hash:
        remedy = "prepare the text with --holdout to have metrics of unseen text"
        print(f"warning: {data}: the model was trained on all of this corpus; {remedy}", file=sys.stderr)
    if model.proposal is not None and not model.proposal.has_counts:
        raise InputError(
            f"{source}: a unigram generator's token counts are not exported; evaluate the run or one of its checkpoints"
        )
    check_vocabulary(tokenizer_folder(Path(source), model.config.model.vocab_size), corpus)
    config = model.config
    changes = {"sequence_length": sequence_length or min(config.data.sequence_length, config.model.max_positions)}
    config = config.replace({"data": changes, "train": {"batch_size": batch_size or config.train.batch_size}})
    # fp32 and the backend that runs everywhere, whatever the model was trained with.
    compute = ComputeConfig("sdpa", torch.float32)
    return evaluate_model(model, corpus.path, config, compute, max_batches)


@torch.no_grad()
def evaluate_model(
    model: Electra,
    corpus: Path,
    config: Config,
    compute: ComputeConfig,
    max_batches: int = 0,
    objective: Objective | None = None,
) -> dict[str, Number]:
    """One pass (or `max_batches` batches) over a corpus, masked and sampled by `SEED`, by the configured objective.

    `objective` takes its place: that of a run's stage.
    """
    objective, device = objective or objective_of(config), next(model.parameters()).device
    totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in objective.metric_totals}
    logits, labels, num_rows = [], [], 0
    modes = {module: module.training for module in model.modules()}  # frozen parts are in evaluation mode
    model.eval()
    loader = BatchLoader.from_config(config, corpus=corpus, seed=SEED, epochs=1)
    for number, rows in enumerate(itertools.islice(loader, max_batches or None)):
        batch = to_torch(rows, device=device)
        key = RngKey(torch.tensor([SEED, number], device=device))
        output = objective.forward(model, batch, compute, key, objective.loss_denominators(batch))
        for name, total in output.totals.items():
            totals[name] += total
        num_rows += batch["input_ids"].shape[0]
        found = output.predictions
        if found is not None:
            logits.append(found.logits_T[found.valid_T].float().cpu().numpy())
            labels.append(found.replaced_T[found.valid_T].cpu().numpy())
    for module, is_training in modes.items():
        module.training = is_training
    read = {name: float(total) for name, total in totals.items()}
    auc = metrics.area_under_curve(np.concatenate(logits), np.concatenate(labels)) if logits else None
    return {"discriminator_auc": auc, **objective.metrics(read), "rows": num_rows, "tokens": int(read["tokens"])}

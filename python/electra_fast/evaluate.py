"""Held-out figures of a model: losses, accuracies, and the discriminator's ranking of all tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch

from electra_fast import electra, metrics
from electra_fast.config import Config
from electra_fast.corpus import Corpus
from electra_fast.data import BatchLoader, to_torch
from electra_fast.electra import Backend, RngKey
from electra_fast.export import load, tokenizer_folder
from electra_fast.huggingface_tokenizer import check_vocabulary
from electra_fast.metrics import Number
from electra_fast.model import Electra

# Evaluation draws masks and samples from a seed of its own, the same for every run.
SEED = 20_190_925


def held_out_folder(corpus: Path) -> Path:
    """The corpus' held-out part where `prepare --holdout` made one, else the corpus itself."""
    holdout = corpus / "holdout"
    return holdout if (holdout / "manifest.json").exists() else corpus


def evaluate(
    source: str | Path,
    data: str | Path,
    *,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    max_batches: int = 0,
    device: str | None = None,
) -> dict[str, Number]:
    """Held-out figures of a run, a checkpoint or an exported folder.

    Args:
        source: run, checkpoint or Hugging Face folder.
        data: corpus; its held-out part is used where it has one.
        sequence_length: tokens a row; the run's own by default.
        batch_size: rows a batch; the run's own by default.
        max_batches: stop after so many; 0 for one whole pass.
        device: e.g. "cpu"; CUDA where there is one by default.

    Returns:
        `discriminator_auc` and the means of `metrics.jsonl`, with `rows` and `tokens` they are over.

    Raises FileNotFoundError or ValueError where either folder is not what it should be, or where
    the corpus was prepared with another vocabulary than the model's.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load(source).to(where)
    check_vocabulary(tokenizer_folder(Path(source), model), Corpus(held_out_folder(Path(data))))
    config = model.config
    changes = {"sequence_length": sequence_length or min(config.data.sequence_length, config.model.max_positions)}
    config = config.replace({"data": changes, "train": {"batch_size": batch_size or config.train.batch_size}})
    # Whatever it was trained with: fp32 and the backend that runs everywhere.
    return evaluate_model(model, Path(data), config, Backend("sdpa", torch.float32), max_batches)


@torch.no_grad()
def evaluate_model(
    model: Electra, corpus: Path, config: Config, backend: Backend, max_batches: int = 0
) -> dict[str, Number]:
    """One pass (or `max_batches` batches) over a corpus' held-out part, masked and sampled by `SEED`."""
    loader = BatchLoader(
        str(held_out_folder(corpus)),
        sequence_length=config.data.sequence_length,
        batch_size=config.train.batch_size,
        seed=SEED,
        masking=config.data.masking,
        mask_prob=config.data.mask_prob,
        packing=config.data.packing,
        epochs=1,
    )
    device = next(model.parameters()).device
    sums = torch.zeros(len(electra.SUMS), dtype=torch.float64, device=device)
    logits, labels, num_rows = [], [], 0
    was_training = model.training
    model.eval()
    for number, rows in enumerate(itertools.islice(loader, max_batches or None)):
        batch = to_torch(rows, device=str(device))
        rng_key = RngKey(torch.tensor([SEED, number], device=device))
        output = electra.forward(model, batch, backend, rng_key, electra.count(batch))
        sums += output.sums
        num_rows += batch["input_ids"].shape[0]
        if output.logits_T is not None and output.replaced_T is not None and output.valid_T is not None:
            logits.append(output.logits_T[output.valid_T].float().cpu().numpy())
            labels.append(output.replaced_T[output.valid_T].cpu().numpy())
    model.train(was_training)
    totals = sums.cpu().numpy()
    auc = metrics.area_under_curve(np.concatenate(logits), np.concatenate(labels)) if logits else None
    tokens = int(totals[electra.SUMS.index("tokens")])
    return {"discriminator_auc": auc, **metrics.summarise(totals, config.objective), "rows": num_rows, "tokens": tokens}

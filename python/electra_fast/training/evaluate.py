"""Validation metrics of a model: losses, accuracies, the discriminator's AUCs, and masked-language-model accuracy.

An AUC measures how well a discriminator distinguishes replacements from the original text, so two models are comparable
only with the same source of replacements. For `unigram_auc` this source is the same for all models: it samples tokens
by frequency. All other metrics use the model's generator, as in training, or the source in `corrupted_by`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from electra_fast.config.config import AUTO, Config
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.loader import BatchLoader, padding_row, rows_of, to_torch
from electra_fast.data.mixture import Corpora, Mixture, missing_folder
from electra_fast.distributed.division import nth_part, rows_per_micro_batch
from electra_fast.distributed.world import World
from electra_fast.errors import InputError, is_out_of_memory
from electra_fast.files.atomic_files import replace_file
from electra_fast.huggingface.folder import read_model
from electra_fast.huggingface.source import checkpoint_of, origin, tokenizer_folder
from electra_fast.huggingface.tokenizer import check_vocabulary
from electra_fast.messages import say
from electra_fast.model.compute import ComputeConfig, choose_device, resolve_compute, use_compute
from electra_fast.model.matmul import fastest_matmul
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import METRICS, Forward, MicroBatch, Number, Objective, Output, RngKey
from electra_fast.ops.sampling import alias_table
from electra_fast.results import Entries, table_lines
from electra_fast.training.corruptor import UNIGRAM, UNIGRAM_LENGTH, Corruptor, corrupted_rows, max_positions
from electra_fast.training.mlm_accuracy import mlm_accuracy

# Seed of masks and samples in every evaluation, independent of the run's seed.
SEED = 20_190_925
NUM_SENTENCES = 6
"""Rows with a verdict on each word."""
# Metrics that are reported first.
FIRST = ("unigram_auc", "discriminator_auc", "discriminator_loss", "generator_loss")

# The number of a batch, the index of a part's first row within the batch, and the part's tensors.
_Batches = Iterator[tuple[int, int, Mapping[str, Tensor]]]


class Evaluation(Entries):
    """Validation metrics of a model by name (`evaluate`). Metrics that are comparable between models come first."""

    def lines(self) -> Iterator[str]:
        """Yields the lines that the command prints."""
        rest = dict(self)
        if self["unigram_auc"] is not None and "corruption" not in self:
            auc = rest.pop("unigram_auc")
            length = rest.pop("unigram_sequence_length")
            yield f"Comparable between models (replacements drawn by token frequency, rows of {length} tokens):"
            yield from table_lines({"unigram_auc": auc}, "  ")
            yield "Not comparable between models (replacements from each model's generator):"
        yield from table_lines(rest, "  ")


def evaluate(
    source: str | Path,
    data: Corpora | None = None,
    *,
    out: str | Path | None = None,
    device: str = AUTO,
    precision: str = "fp32",
    batch_size: int | None = None,
    sequence_length: int | None = None,
    max_batches: int = 0,
    corrupted_by: str | Path | None = None,
    mlm_examples: int = 0,
) -> Evaluation:
    """Returns validation metrics of a run, a checkpoint or an exported folder, as `electra_fast.evaluate` describes."""
    if mlm_examples < 0:
        raise InputError(f"mlm_examples = {mlm_examples}: must be 0 (none) or more")
    target = choose_device(device)
    model = read_model(source).to(target)
    mixture = _training_corpus(Path(source)) if data is None else Mixture(data)
    corpora = _validation_sets(source, mixture)
    check_vocabulary(tokenizer_folder(Path(source), model.config.model.vocab_size), mixture.corpora[0])
    model.limit_vocabulary(mixture.vocab_size)
    config = model.config
    if batch_size is not None:
        config = config.override({"train.batch_size": batch_size, "train.accumulate": 1})
    # Reference operations, and the attention backend that runs everywhere, independent of training.
    compute = resolve_compute(model.config.model, target, precision, fastest_matmul(model.config.model, target), "sdpa")
    compute = dataclasses.replace(compute, kernels=(("*", "reference"),) if target.type == "cuda" else ())
    if checkpoint_of(Path(source)) is None:  # Hugging Face folders do not have this head
        config = config.override({"objective.corrective_weight": 0.0})
    report: dict[str, Number | str]
    if corrupted_by is None:
        own_length = min(config.data.sequence_length, config.model.max_positions)
        config = config.override({"data.sequence_length": sequence_length or own_length})
        report = {**_evaluate_uncorrupted(source, model, mixture, corpora, config, compute, max_batches)}
        length = sequence_length or min(UNIGRAM_LENGTH, max_positions(model) or UNIGRAM_LENGTH)
    else:
        corruptor = _corruptor(corrupted_by, mixture, target)
        length = sequence_length or corruptor.sequence_length
        _check_length(source, model, length, corrupted_by, corruptor)
        config = _common_config(config, length)
        report = _evaluate_corrupted(model, corpora, config, compute, max_batches, corruptor)
    if corrupted_by == UNIGRAM:
        report["unigram_auc"] = report["discriminator_auc"]
    elif "discriminator" in model.networks:
        if corrupted_by is None:
            _check_length(source, model, length)
            report["unigram_sequence_length"] = length
        world = World()
        common = _common_config(config, length)
        report["unigram_auc"] = unigram_auc(
            model, corpora, common, compute, max_batches, world, lambda objective: objective.forward
        )
    report = {name: report.get(name) for name in FIRST} | report
    if mlm_examples:
        length = config.data.sequence_length
        with use_compute(compute):
            report |= mlm_accuracy(model, corpora, sequence_length=length, seed=SEED, num_examples=mlm_examples)
    evaluation = Evaluation(report)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        replace_file(Path(out) / "evaluation.json", evaluation.to_json() + "\n")
        say(f"{Path(out) / 'evaluation.json'}: {report['tokens']} tokens")
    return evaluation


def _evaluate_uncorrupted(
    source: str | Path,
    model: Electra,
    mixture: Mixture,
    corpora: Corpora,
    config: Config,
    compute: ComputeConfig,
    max_batches: int,
) -> dict[str, Number]:
    """Evaluates with replacements from the model's generator; all metrics are None if it has none."""
    if "discriminator" in model.networks and "generator" not in model.networks and model.proposal is None:
        say(f"note: {source}: has only a discriminator; all metrics except unigram_auc need a generator")
        return dict.fromkeys(METRICS)
    if model.proposal is not None and not model.proposal.has_counts:
        model.proposal.set_counts(torch.from_numpy(mixture.token_counts()))
        say(f"note: {source}: a unigram generator's token counts are not exported; using the counts of this corpus")
    return evaluate_model(model, corpora, config, compute, max_batches)


def evaluate_model(
    model: Electra,
    corpora: Corpora,
    config: Config,
    compute: ComputeConfig,
    max_batches: int = 0,
    objective: Objective | None = None,
    world: World | None = None,
    forward: Forward | None = None,
) -> dict[str, Number]:
    """Evaluates one pass (or `max_batches` batches) over corpora, masked and sampled with `SEED`.

    `objective`, of a stage, replaces the configured one. If the model is sharded, `forward` replaces its forward pass.
    The ranks of a `world` divide each batch, and all return the metrics.
    """
    world = world or World()
    objective = objective or objective_of(config)
    batches = _batches(corpora, config, max_batches, next(model.parameters()).device, world)
    return _measure(model, objective, compute, batches, world, forward or objective.forward)


def unigram_auc(
    model: Electra,
    corpora: Corpora,
    config: Config,
    compute: ComputeConfig,
    max_batches: int,
    world: World,
    wrapped: Callable[[Objective], Forward],
) -> Number:
    """Returns the AUC of a discriminator over all tokens, on replacements that do not depend on its training.

    Rows have the run's length. Replacements are sampled from the distribution of the tokens masked in these rows.
    `wrapped` returns an objective's forward pass, wrapped if the model is sharded.
    """
    config = _discriminator_config(_common_config(config, config.data.sequence_length))
    objective = objective_of(config)
    device = next(model.parameters()).device
    counts_V = _masked_counts(corpora, config, max_batches, world)
    if not counts_V.any():
        return None
    corruptor = Corruptor(alias_table(counts_V).to(device), len(counts_V), config.data.sequence_length, SEED)
    batches = _with_samples(_batches(corpora, config, max_batches, device, world), corruptor, config.train.batch_size)
    return _measure(model, objective, compute, batches, world, wrapped(objective))["discriminator_auc"]


def unigram_entropy(corpora: Corpora, config: Config, max_batches: int, world: World) -> float:
    """Returns the loss, in nats per masked token, of a model that knows only token frequencies."""
    counts_V = _masked_counts(corpora, config, max_batches, world)
    probs = counts_V[counts_V > 0] / counts_V.sum()
    # Corrects the bias of a small sample's entropy (Miller, 1955).
    return float(-(probs * probs.log()).sum() + (len(probs) - 1) / (2 * counts_V.sum()))


def _masked_counts(corpora: Corpora, config: Config, max_batches: int, world: World) -> Tensor:
    """Returns how often each token is masked; fp64 [V] on the CPU."""
    counts_V = torch.zeros(config.model.vocab_size, dtype=torch.float64)
    for *_, batch in _batches(corpora, config, max_batches, torch.device("cpu"), world):
        masked_ids = batch["masked_ids"][batch["masked_weights"] > 0]
        counts_V += torch.bincount(masked_ids, minlength=len(counts_V))
    return world.all_gather(counts_V).sum(0)


def _evaluate_corrupted(
    model: Electra, corpora: Corpora, config: Config, compute: ComputeConfig, max_batches: int, corruptor: Corruptor
) -> dict[str, Number | str]:
    """Evaluates on text with a corruptor's replacements, for metrics that are comparable between models."""
    digest = hashlib.sha256()

    def with_digest(batches: _Batches) -> _Batches:
        for number, first_row, batch in batches:
            for ids in corrupted_rows(batch):
                digest.update(ids.cpu().numpy().astype("<i4").tobytes())
            yield number, first_row, batch

    if "discriminator" in model.networks:
        config = _discriminator_config(config)
    batches = _batches(corpora, config, max_batches, next(model.parameters()).device, World())
    batches = with_digest(_with_samples(batches, corruptor, config.train.batch_size))
    objective = objective_of(config)
    metrics: dict[str, Number | str] = {**_measure(model, objective, compute, batches, World(), objective.forward)}
    metrics["loss"] = None
    if "generator" not in model.networks:
        metrics |= {"generator_loss": None, "generator_accuracy": None}
    return metrics | {"sequence_length": config.data.sequence_length, "corruption": digest.hexdigest()[:16]}


def _discriminator_config(config: Config) -> Config:
    """Returns a configuration that evaluates the discriminator over all tokens and corrupts all segments."""
    return config.with_objective("electra").override(contrastive_weight=0.0, corrective_weight=0.0)


def _with_samples(batches: _Batches, corruptor: Corruptor, batch_size: int) -> _Batches:
    """Adds a corruptor's samples to the batches. They depend on each row's number in the loader's stream."""
    for number, first_row, batch in batches:
        yield number, first_row, {**batch, "sampled_ids": corruptor.sample(batch, number * batch_size + first_row)}


def _batches(corpora: Corpora, config: Config, max_batches: int, device: torch.device, world: World) -> _Batches:
    """Yields a rank's rows of each batch: at once on a CPU, in micro-batches on a GPU, the same number on each rank."""
    loader = BatchLoader.from_config(
        config, corpus=corpora, seed=SEED, epochs=1, rank=world.rank, world_size=world.size
    )
    size = config.train.batch_size
    max_rows = _max_rows(config, device, world)
    num_rows = loader.num_rows if world.size > 1 else 0
    for number, rows in enumerate(itertools.islice(loader, max_batches or None)):
        # The last batch may have fewer rows.
        total = min(size, num_rows - number * size) if world.size > 1 else rows.num_rows
        local_rows = nth_part(total, world.rank, world.size)
        batch = to_torch(rows, device=device)
        num_parts = math.ceil(math.ceil(total / world.size) / max_rows)
        for part in (nth_part(len(local_rows), i, num_parts) for i in range(num_parts)):
            yield number, local_rows.start + part.start, rows_of(batch, part)


def _max_rows(config: Config, device: torch.device, world: World) -> int:
    return rows_per_micro_batch(config.train, world.size) if device.type == "cuda" else config.train.batch_size


def _outputs(run: Callable[[int, int, Mapping[str, Tensor]], Output], batches: _Batches) -> Iterator[Output]:
    """Runs parts of batches. After running out of memory, runs this part and all later parts in halves."""
    num_pieces = 1
    for number, first_row, batch in batches:
        num_rows = len(batch["input_ids"])
        parts = (nth_part(num_rows, i, num_pieces) for i in reversed(range(num_pieces)))
        pending = [part for part in parts if part]
        while pending:
            rows = pending.pop()
            output = None
            try:
                output = run(number, first_row + rows.start, rows_of(batch, rows))
            except (RuntimeError, MemoryError) as error:
                if len(rows) < 2 or not is_out_of_memory(error):
                    raise
                num_pieces *= 2
                halves = ((group[len(group) // 2 :], group[: len(group) // 2]) for group in (*pending, rows))
                pending = [half for pair in halves for half in pair if half]
            if output is not None:
                yield output


@torch.no_grad()
def _measure(
    model: Electra,
    objective: Objective,
    compute: ComputeConfig,
    batches: _Batches,
    world: World,
    forward: Forward,
) -> dict[str, Number]:
    device = next(model.parameters()).device
    totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in objective.metric_totals}
    logits = [np.empty(0, np.float32)]
    labels = [np.empty(0, np.bool_)]
    num_rows = 0
    modes = {module: module.training for module in model.modules()}  # frozen parts are in evaluation mode already
    model.eval()

    def run(number: int, first_row: int, batch: Mapping[str, Tensor]) -> Output:
        key = RngKey(torch.tensor([SEED, number], device=device), first_row)
        with use_compute(compute):
            return forward(model, MicroBatch(batch, compute, key, objective.loss_denominators(batch)))

    def with_count(batches: _Batches) -> _Batches:
        nonlocal num_rows
        for number, first_row, batch in batches:
            num_rows += len(batch["input_ids"])
            # Runs even if this rank has no rows: other ranks may need its shard of the model.
            yield number, first_row, batch if len(batch["input_ids"]) else padding_row(batch)

    # Ranks of a sharded model have to make the same calls.
    is_whole = forward == objective.forward
    for output in _outputs(run, with_count(batches)) if is_whole else itertools.starmap(run, with_count(batches)):
        for name, total in output.totals.items():
            totals[name] += total
        if (predicted := output.predictions) is not None:
            logits.append(predicted.logits_T[predicted.valid_T].float().cpu().numpy())
            labels.append(predicted.replaced_T[predicted.valid_T].cpu().numpy())
    for module, is_training in modes.items():
        module.training = is_training
    local_totals = torch.tensor([*(float(total) for total in totals.values()), num_rows], dtype=torch.float64)
    *sums, num_rows = world.all_gather(local_totals).sum(0).tolist()
    read = dict(zip(totals, sums, strict=True))
    predictions = world.all_gather_object((np.concatenate(logits), np.concatenate(labels)))
    all_logits, all_labels = (np.concatenate(arrays) for arrays in zip(*predictions, strict=True))
    auc = area_under_curve(all_logits, all_labels) if len(all_logits) else None
    return {"discriminator_auc": auc, **objective.metrics(read), "rows": int(num_rows), "tokens": int(read["tokens"])}


def area_under_curve(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_]) -> float | None:
    """Returns the area under the ROC curve of the discriminator's logits, with ties counted half.

    Returns None if only one class occurs. Computed as the Mann-Whitney U of the replaced tokens, since importing
    scikit-learn takes as long as importing torch. Raises ValueError if logits are not finite.
    """
    if not np.isfinite(logits).all():
        raise InputError("the discriminator's logits are not finite: its training diverged; use an earlier checkpoint")
    if labels.all() or not labels.any():
        return None
    _, places, counts = np.unique(logits, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    num_positive = int(labels.sum())
    num_negative = int((~labels).sum())
    u = mean_ranks[places[labels]].sum() - num_positive * (num_positive + 1) / 2
    return float(u / (num_positive * num_negative))


def _training_corpus(source: Path) -> Mixture:
    """Returns the corpus that a run was trained on, and prints it. Raises ValueError or OSError if it is missing."""
    stored = checkpoint_of(source)
    remedy = "pass the corpus to evaluate on after the model"
    folders = Config.load(stored / "config.toml").data.corpus if stored else ""
    if not folders:
        raise InputError(f"{source}: has no record of its training corpus; {remedy}")
    if missing := missing_folder(folders):
        raise FileNotFoundError(f"{source}: was trained on {missing}, which no longer exists; {remedy}")
    mixture = Mixture(folders)
    trained_on = origin(source).corpus
    if trained_on not in (None, mixture.content_hash):
        raise InputError(f"{source}: {mixture} has changed since the run was trained on it; {remedy}")
    part = "all of it" if mixture.holdout is None else "validation set"
    say(f"{source}: evaluated on its training corpus, {mixture} ({part})")
    return mixture


def _validation_sets(source: str | Path, mixture: Mixture) -> Corpora:
    """Returns the folders to evaluate a model on; warns if the model was trained on all of a folder."""
    if mixture.holdout is not None:
        return mixture.holdout
    trained_on = origin(Path(source)).corpus or ""
    for folder, corpus in zip(mixture.folders, mixture.corpora, strict=True):
        if corpus.content_hash in trained_on:
            say(
                f"warning: {folder}: the model was trained on all of this corpus; "
                "prepare the text with --holdout to evaluate on unseen text"
            )
    return mixture.folders[0] if mixture.is_single else mixture.folders


def _corruptor(corrupted_by: str | Path, mixture: Mixture, device: torch.device) -> Corruptor:
    if corrupted_by == UNIGRAM:
        return Corruptor.unigram(mixture, SEED, device)
    return Corruptor.load(Path(corrupted_by), mixture.corpora[0], SEED, device)


def _common_config(config: Config, length: int) -> Config:
    """Returns a configuration whose rows do not depend on a model's training."""
    rows = {"sequence_length": length, "packing": "best-fit", "cut_at": "token", "masking": "tokens", "mask_prob": 0.15}
    # `_check_length` checks the model's positions, so the configuration need not limit them here.
    return config.override(rows, max_positions=max(config.model.max_positions, length))


def _check_length(
    source: str | Path,
    model: Electra,
    length: int,
    corrupted_by: str | Path = UNIGRAM,
    corruptor: Corruptor | None = None,
) -> None:
    """Raises ValueError if rows are too long for model or corruptor; warns if the rows in training were shorter."""
    limits = {source: max_positions(model), corrupted_by: corruptor.max_positions if corruptor else None}
    for folder, longest in limits.items():
        if longest is not None and length > longest:
            raise InputError(
                f"{folder}: reads at most {longest} tokens, but rows have {length}; pass --sequence-length {longest} "
                "or less, and the same value for all compared models"
            )
    trained = model.config.data.sequence_length
    if trained < length:
        say(
            f"warning: {source}: was trained on rows of {trained} tokens and is evaluated on rows of {length}; "
            f"pass --sequence-length {trained} for all compared models"
        )


@dataclass(frozen=True)
class Word:
    """A word after corruption by the generator, with the discriminator's probability that it was replaced."""

    text: str
    original: str
    is_replaced: bool
    probability: float

    @property
    def verdict(self) -> str:
        """`original`, `doubtful` or `replaced`."""
        return "replaced" if self.probability > 0.5 else "doubtful" if self.probability > 0.25 else "original"


@torch.no_grad()
def verdicts(run: Path, corpus: Corpus) -> list[list[Word]]:
    """Returns rows of the validation set, corrupted by the generator, with the discriminator's verdict on each word.

    Raises InputError if the newest checkpoint has no discriminator, if the corpus has no validation set, or if its
    vocabulary is another.
    """
    model = read_model(run)
    config = model.config
    validation = corpus.holdout
    tokenizer = Tokenizer.of(corpus)
    if validation is None:
        raise InputError("the corpus has no validation set; prepare it with --holdout")
    if corpus.vocab_size != config.model.vocab_size:
        raise InputError(f"corpus vocabulary: expected {config.model.vocab_size} entries, got {corpus.vocab_size}")
    loader = BatchLoader.from_config(config, corpus=validation, batch_size=NUM_SENTENCES, seed=SEED, epochs=1)
    batch = to_torch(next(loader))
    objective = objective_of(config)
    key = RngKey(torch.tensor([SEED, 0]))
    denominators = objective.loss_denominators(batch)
    output = objective.forward(model, MicroBatch(batch, ComputeConfig("sdpa", torch.float32), key, denominators))
    predictions = output.predictions
    if predictions is None:
        raise InputError(f"objective.name = {config.objective.name}: has no discriminator")
    shape = batch["input_ids"].shape
    original = batch["input_ids"].long().scatter(1, batch["masked_positions"].long(), batch["masked_ids"].long())
    replaced_prob_T = predictions.logits_T.sigmoid()
    columns = (original, predictions.corrupted_ids_T, predictions.replaced_T, replaced_prob_T, batch["segment_ids"])
    rows = zip(*(column.view(shape).tolist() for column in columns), strict=True)
    return [_words(tokenizer, *row) for row in rows]


def _words(
    tokenizer: Tokenizer,
    original: list[int],
    corrupted: list[int],
    replaced: list[bool],
    probability: list[float],
    segments: list[int],
) -> list[Word]:
    """Returns a row's words, joined from their pieces. A word's probability is the maximum over its pieces."""
    special = set(tokenizer.special_tokens.values())
    words: list[Word] = []
    for i, token_id in enumerate(corrupted):
        if not segments[i] or original[i] in special:
            continue
        piece = tokenizer.id_to_token(token_id)
        original_piece = tokenizer.id_to_token(original[i])
        if not original_piece.startswith("##"):
            words.append(Word(piece, original_piece, replaced[i], probability[i]))
        elif words:  # otherwise the row starts inside a word
            words[-1] = Word(
                words[-1].text + piece.removeprefix("##"),
                words[-1].original + original_piece.removeprefix("##"),
                words[-1].is_replaced or replaced[i],
                max(words[-1].probability, probability[i]),
            )
    return words

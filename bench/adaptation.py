"""Which way of adapting an encoder of our own to a domain gains, by a task of that domain.

    python bench/adaptation.py RUN CORPUS --domains packages books=FOLDER --out FOLDER [--only WAY...]

RUN is a finished run that kept the checkpoint at 70 % of its steps, CORPUS what it was trained on. Each way of `WAYS`
trains for the FLOPs of `--steps` steps of RUN, on the domain's text unless it says otherwise, and is fine-tuned on the
domain's task (`lib/domains.py`) with `--seeds` seeds: last step, for these texts judge. One job per core at a time; a
finished one is a line of FOLDER/results.jsonl, and the same command resumes. Prints the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from lib import domains
from lib.results import commit, markdown, processor

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.files import checkpoint_folder
from electra_fast.hardware.flops import flops_per_token
from electra_fast.huggingface.tokenizer import copy_tokenizer
from electra_fast.messages import quietly
from electra_fast.model.networks import PARTS
from electra_fast.objectives import electra
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import Stage

ADAMW = {"optimizer.name": "adamw", "optimizer.schedule": "linear", "optimizer.bias_correction": True}
WEIGHT = "objective.disc_weight"
HEAD_STEPS = 100
"""Steps in which the new head of "mlm, then rtd" trains alone."""
TASK = {"finetune.sequence_length": 64, "finetune.select": "last", "finetune.evals_per_epoch": 0}


@dataclass(frozen=True)
class Way:
    """A way to adapt.

    Args:
        start: What trains: "pair", both networks of the run; "mlm", its discriminator's encoder, with the corrective
            head; "frozen pair" and "frozen mlm", the embeddings of these alone; "earlier", the run from 70 % of its
            steps; "new", random weights, for the FLOPs of run and adaptation; "after-mlm", the discriminator that
            masked language modeling for half of the FLOPs made, with that model as generator; "", nothing.
        rate: Learning rate of AdamW; or, from 0.01 on, the share of the run's own rates, with its own optimizer.
        text: Shares of domain, general text, and the texts of the task's training set.
        keys: More keys of the configuration.
    """

    start: str
    rate: float = 0.25
    text: tuple[float, float, float] = (1, 0, 0)
    keys: Mapping[str, Any] = field(default_factory=dict)


WAYS = {
    "as it is": Way(""),
    "rtd": Way("pair"),
    "mlm": Way("mlm"),
    "general text": Way("pair", text=(0, 1, 0)),
    **{
        f"{name} {rate:g}": Way(start, rate)
        for name, start in (("rtd", "pair"), ("mlm", "mlm"))
        for rate in (0.1, 0.5, 1)
    },
    **{f"rtd {rate:g}": Way("pair", rate) for rate in (2.5e-5, 5e-5, 1e-4, 5e-4)},
    **{f"rtd 0.0001, weight {weight}": Way("pair", 1e-4, keys={WEIGHT: weight}) for weight in (20, 50)},
    "rtd, weight 50": Way("pair", keys={WEIGHT: 50}),
    **{f"mlm {rate:g}": Way("mlm", rate) for rate in (1e-4, 5e-4)},
    **{f"{way}, a quarter general": Way(start, text=(3, 1, 0)) for way, start in (("rtd", "pair"), ("mlm", "mlm"))},
    **{f"{way}, task's texts": Way(start, text=(0, 0, 1)) for way, start in (("rtd", "pair"), ("mlm", "mlm"))},
    "before the decay": Way("earlier", text=(3, 1, 0)),
    "mlm, then rtd": Way("after-mlm"),
    "rtd, embeddings": Way("frozen pair"),
    "mlm, embeddings": Way("frozen mlm"),
    "from nothing": Way("new"),
}


def stages_of(way: Way) -> None:
    """Freezes what the way keeps, in this process; the package has no such option."""

    def embeddings_alone(self: Any) -> tuple[Stage, ...]:
        networks = self.networks()
        frozen = tuple(networks) + tuple(head for network in networks.values() for head in network.heads)
        return (Stage("embeddings", self, 0, self.config.train.steps, frozen),)

    def head_first(self: Any) -> tuple[Stage, ...]:
        steps, generator = self.config.train.steps - HEAD_STEPS, PARTS["generator"]
        return (
            Stage("head", self, 0, HEAD_STEPS, (*generator, *PARTS["discriminator"][:2])),
            Stage("replaced-token detection", self, HEAD_STEPS, steps, generator),
        )

    if way.start.startswith("frozen"):
        electra.ElectraObjective.stages = MaskedLMObjective.stages = embeddings_alone  # type: ignore[method-assign]
    if way.start == "after-mlm":
        electra.TwoStageObjective.stages = head_first  # type: ignore[method-assign]
        electra.TwoStageObjective.begin_stage = lambda *_: None  # type: ignore[method-assign]


def state_of(run: Path, names: Mapping[str, str] | None = None) -> tuple[ef.Config, dict[str, torch.Tensor]]:
    """Configuration and parameters of a run; with `names`, those of some modules under other names."""
    latest = checkpoint_folder.latest(run)
    assert latest is not None
    model = checkpoint.load_model(latest)
    if names is None:
        return model.config, model.state_dict()
    found = {new: model.get_submodule(old).state_dict() for new, old in names.items()}
    return model.config, {f"{new}.{name}": x for new, state in found.items() for name, x in state.items()}


def train(way: Way, domain: str, run: Path, options: argparse.Namespace, share: float = 1.0) -> None:
    """Trains a way to its end, from where it was stopped; `share` of the FLOPs."""
    base = ef.Config.load(options.run / "config.toml")
    texts = (options.out / domain / "text", options.corpus, options.out / domain / "task")
    shares = (options.steps, base.train.steps, 0) if way.start == "new" else way.text
    corpora = {str(folder): weight for folder, weight in zip(texts, shares, strict=True) if weight}
    usual = {"train.eval_every": 0, "train.keep_checkpoints": 1, "train.execution": "eager"}
    if way.start in ("earlier", "new"):
        steps = base.train.steps + options.steps
        is_new = not run.exists()
        if is_new and way.start == "earlier":
            shutil.copytree(options.run, run)
        at = round(0.7 * base.train.steps) if is_new and way.start == "earlier" else None
        config = base.override({**usual, "train.steps": steps})
        ef.pretrain(corpora, config=config, out=run, from_step=at, allow_changes=True)
        return
    if not (run / "config.toml").exists():
        config, state = state_of(options.run)
        if way.start.endswith("mlm"):
            names = {
                "generator_embeddings": "embeddings",
                "generator": "discriminator",
                "generator_head": "corrective_head",
            }
            config, (_, state) = config.with_objective("mlm"), state_of(options.run, names)
        if way.start == "after-mlm":
            first = run.parent / "first"
            train(WAYS["mlm"], domain, first, options, share=0.5)
            names = dict(zip(PARTS["generator"], PARTS["generator"], strict=True))
            names |= dict(zip(PARTS["discriminator"][:2], PARTS["generator"][:2], strict=True))
            config = base.with_objective("two-stage").override({"objective.corrective_weight": 0})
            state, share = state_of(first, names)[1], 0.5
        rates = base.resolved().optimizer
        own = {f"optimizer.{key}": way.rate * vars(rates)[key] for key in ("learning_rate", "muon_learning_rate")}
        keys = own if way.rate >= 0.01 else {**ADAMW, "optimizer.learning_rate": way.rate}
        keys |= {**usual, **way.keys, "optimizer.warmup_steps": -1, "train.checkpoint_every": 200}
        config = config.override({**keys, "train.seed": options.seed})
        steps = round(share * options.steps * flops_per_token(base).total / flops_per_token(config).total)
        config = config.override({"train.steps": steps})
        model = ef.Electra(config)
        missing = model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys and all(
            name.startswith("discriminator_head") for name in missing.missing_keys
        )
        copy_tokenizer(options.run / "tokenizer", run / "tokenizer", ["input_ids", "attention_mask"])
        checkpoint.save(run, model, None, checkpoint_folder.TrainState(imported=True), keep=1)
        (run / "config.toml").write_text(config.to_toml())
    stages_of(way)
    ef.pretrain(corpora, out=run)


def do(name: str, domain: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains and judges; returns the line of the results."""
    way, folder = WAYS[name], options.out / domain / f"{name}-{options.seed}".replace(" ", "-")
    with quietly():
        if way.start:
            train(way, domain, folder / "run", options)
        data = {split: options.out / domain / f"{split}.jsonl" for split in ("train", "dev")}
        source = folder / "run" if way.start else options.run
        found = judged(source, data, folder / "task", options.seeds)
    line = {"run": options.run.name, "domain": domain, "way": name, "seed": options.seed, "steps": options.steps}
    return line | found | {"commit": commit(), "processor": processor()}


def judged(source: Path, data: Mapping[str, Any], out: Path, seeds: int) -> dict[str, list[float]]:
    """Accuracy and macro F1 of each fine-tuning; without seeds, of logistic regression on means of hidden states."""
    if seeds:
        results = ef.finetune(source, task="classification", out=out, seeds=seeds, overrides=TASK, **data)
        return {key: [run[key] for run in results["classification"]["runs"]] for key in ("accuracy", "f1_macro")}
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = ef.load(source)
    rows = {split: [json.loads(line) for line in path.read_text().splitlines()] for split, path in data.items()}
    vectors = {split: model.encode([row["text"] for row in found]) for split, found in rows.items()}
    labels = {split: [row["label"] for row in found] for split, found in rows.items()}
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1_000))
    answers = classifier.fit(vectors["train"], labels["train"]).predict(vectors["dev"])
    right = sum(answer == label for answer, label in zip(answers, labels["dev"], strict=True))
    return {"accuracy": [right / len(answers)], "f1_macro": [f1_score(labels["dev"], answers, average="macro")]}


def table(lines: list[dict[str, Any]]) -> str:
    """A row per way, a column per domain: the median of all fine-tunings, and their values by seed."""
    columns = list(dict.fromkeys(line["domain"] for line in lines))
    rows = []
    for way in WAYS:
        cells = []
        for column in columns:
            values = [
                100 * x for line in lines if (line["domain"], line["way"]) == (column, way) for x in line["accuracy"]
            ]
            shown = ", ".join(f"{x:.1f}" for x in values)
            cells.append(f"**{statistics.median(values):.1f}** ({shown})" if values else "")
        rows += [[way, *cells]] if any(cells) else []
    return markdown(["way", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--domains", nargs="+", required=True, help=f"of {', '.join(domains.DOMAINS)}; books=FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of ways")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the adaptation")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(line["domain"], line["way"], line["seed"]) for line in lines}
    # Only corpora with the same file of a vocabulary are mixed.
    names, vocab = [], ef.Tokenizer.of(ef.Corpus(options.corpus))
    for name, _, source in (each.partition("=") for each in options.domains):
        names.append(name)
        domains.write(name, options.out / name, Path(source))
        for text in ("text", "task"):
            ef.prepare(options.out / name / f"{text}.jsonl", vocab=vocab, out=options.out / name / text)
    ways = [way for way in WAYS if any(fnmatch(way, pattern) for pattern in options.only)]
    jobs = [(way, name) for way in ways for name in names if (name, way, options.seed) not in done]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
        running = [pool.submit(do, *job, options) for job in jobs]
        for finished in as_completed(running):
            if error := finished.exception():
                print(f"a run failed, and the others go on: {error}", flush=True)
                continue
            lines.append(finished.result())
            with results.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(f"{lines[-1]['domain']}: {lines[-1]['way']}: {lines[-1]['accuracy']}", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()

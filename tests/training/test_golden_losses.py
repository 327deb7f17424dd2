"""Twenty steps of `tiny` for each recipe and objective, from text to losses, compared with recorded losses.

A change that should not change numbers leaves `golden/losses.jsonl` as it is. A change that should change them records
it again (`python tests/training/test_golden_losses.py`, with the package installed) and gives the reason in its commit.
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from variants import VARIANTS

import electra_fast as ef

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.jsonl"
RUNS = [(recipe, name) for recipe in ("paper", "google", "modern", "deberta") for name in ("electra", "mlm")]
RUNS += [("paper", name) for name in VARIANTS if name not in ("electra", "mlm")]
METRICS = ("loss", "generator_loss", "discriminator_loss", "encoder_loss", "replaced_fraction", "grad_norm")
MASKING = {"paper": "tokens", "google": "with-repeats", "modern": "tokens", "deberta": "tokens"}
STEPS = 20
NUM_WORDS = 300
# The order of sums depends on the CPU: without vector instructions, losses differ by up to 1.3e-6 (relative).
TOLERANCE = 2e-5


def write_corpus(folder: Path) -> Path:
    """Writes documents of a few lines whose words hint at the next word; the same for every Python version."""
    rng = random.Random(0)
    words = [f"w{number}" for number in range(NUM_WORDS)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(special + words) + "\n")
    documents = []
    word = 0
    for _ in range(80):
        lines = []
        for _ in range(1 + int(rng.random() * 6)):
            line = []
            for _ in range(4 + int(rng.random() * 30)):
                hop = 1 + int(3 * rng.random()) if rng.random() < 0.8 else int(NUM_WORDS * rng.random() ** 3)
                word = (word + hop) % NUM_WORDS
                line.append(words[word])
            lines.append(" ".join(line))
        documents.append("\n".join(lines))
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    ef.prepare(folder / "text.txt", vocab=folder / "vocab.txt", out=folder / "shards", cased=False, progress=False)
    return folder / "shards"


def losses(corpus: Path, out: Path, recipe: str, name: str) -> list[dict[str, Any]]:
    """Trains a run and returns the metrics of each step, without metrics that the objective does not have."""
    config = ef.Config.preset("tiny", recipe).override(VARIANTS[name] | {"data.masking": MASKING[recipe]})
    rates = {"learning_rate": 4e-3, "muon_learning_rate": 0.01} if recipe == "modern" else {}
    train = {"steps": STEPS, "batch_size": 16, "accumulate": 2, "log_every": 1, "eval_every": 0}
    as_recorded = {"precision": "fp32", "matmul": "default"}
    config = config.override(rates | train | as_recorded, sequence_length=32, warmup_steps=5)
    ef.pretrain(corpus, config=config, out=out)
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    names = ("step", *METRICS)
    run = {"run": f"{recipe} {name}"}
    return [run | {name: record[name] for name in names if record.get(name) is not None} for record in records]


@pytest.fixture(scope="module")
def golden_corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def golden():
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def test_corpus_matches_recorded_hash(golden_corpus, golden):
    assert {"content_hash": ef.Corpus(golden_corpus).content_hash} == golden[0]


@pytest.mark.parametrize(("recipe", "name"), RUNS)
def test_losses_match_recording(golden_corpus, golden, tmp_path, recipe, name):
    actual = losses(golden_corpus, tmp_path / "run", recipe, name)
    expected = [line for line in golden if line.get("run") == f"{recipe} {name}"]
    assert len(actual) == len(expected) == STEPS
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.pop("run") == theirs.pop("run")
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=1e-6)


def record() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder)
        lines = [{"content_hash": ef.Corpus(corpus).content_hash}]
        for recipe, name in RUNS:
            lines += losses(corpus, folder / recipe / name, recipe, name)
    GOLDEN.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    sys.exit(record())

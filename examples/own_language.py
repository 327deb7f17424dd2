"""An encoder for your own language, here Hungarian: from text to a fine-tuned classifier. Comments explain the choices.

Needs texts/ with .txt (blank lines between documents), .jsonl or .parquet files, plain or compressed, and labeled.csv
with the columns `text` and `label`:

    python examples/own_language.py texts/ labeled.csv work/ mini 5000

The last two are the preset and the number of steps. After an interruption, the same command resumes.
"""

import sys
from pathlib import Path

import electra_fast as ef

texts = sys.argv[1]
labeled = sys.argv[2]
out = Path(sys.argv[3])
preset = sys.argv[4]
steps = int(sys.argv[5])

# The vocabulary.
# * Size: a language with many word forms, such as Hungarian, Finnish or Turkish, benefits from more entries than the
#   30,522 of BERT's English. But a small model should not be mostly embeddings: 8,000 for `mini`.
# * Casing: without capitals, "Alma" and "alma" are one word, which suits a small model and little text. Keep them
#   (cased=True) if they matter to your task: names in text, or nouns in German.
# * Accents: kept, since "kor" (age), "kór" (disease) and "kör" (circle) are different words. Strip them only if your
#   users omit them.
vocab = out / "vocab.txt"
if not vocab.exists():
    out.mkdir(parents=True, exist_ok=True)
    size = 32_000 if preset in ("small", "base", "large") else 8_000
    ef.vocab(texts, out=vocab, size=size)

# One percent of the documents is the validation set. `electra-fast inspect work/shards` shows a row as the model reads
# it: look at it once. More than a few [UNK], or more than two tokens per word, means that the vocabulary does not fit.
ef.prepare(texts, vocab=vocab, out=out / "shards", holdout=0.01)

# The preset, by hardware:
#   mini   5,000 steps are 20 minutes to 3 hours of two CPU cores
#   small  100,000 steps are 16 minutes of an H200
#   base   100,000 steps are 10 hours of an H200
# With little text, start from a multilingual encoder instead: `electra-fast import`.
config = ef.Config.preset(preset).override({"train.steps": str(steps)})
ef.pretrain(out / "shards", config=config, out=out / "run")
metrics = ef.evaluate(out / "run", out / "shards", sequence_length=config.data.sequence_length)
print(f"replaced words are found with an AUC of {metrics['unigram_auc']:.3f} (0.5 is chance)")

# Folders for transformers, sentence-transformers and others: docs/how-to/use-your-encoder.md.
ef.export(out / "run", out=out / "model", language=["hu"])

# Only a task shows how good the model is. The majority-class baseline always predicts the most frequent label.
results = ef.finetune(out / "run", task="classification", train=labeled, out=out / "tasks", seeds=3)["classification"]
name = results["metric"]
print(f"{name}: {results['median']:.3f}; of the most frequent label: {results['majority'][name]:.3f}")

"""Searches your own pages by meaning, with an exported encoder that is tuned on these pages first.

    pip install "sentence-transformers[train]>=6"
    python examples/search.py model/encoder pages/ tuned/ "how do I resume a run?"

The pages are .md or .txt files. They give the pairs to tune on: a heading and its text, or two passages in a row. Every
tenth page is left out of the tuning and shows what it gained. A second call finds tuned/ and only answers.
"""

import re
import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss


def pairs_of(page):
    """Yields (query, passage): a passage's query is its heading or, without one, the passage before it."""
    title = query = page.stem
    for block in re.split(r"\n\s*\n|\n(?=#)", page.read_text(encoding="utf-8")):
        if heading := re.match(r"(#+) +(.*)\s*", block):
            title, query = (heading[2],) * 2 if heading[1] == "#" else (title, f"{title}: {heading[2]}")
            block = block[heading.end() :]
        if len(block) >= 50:  # shorter ones say too little to be found
            yield query, block.strip()
            query = block.strip()


def accuracy(model, pairs):
    """Returns the fraction of queries whose own passage is found first."""
    queries, passages = (model.encode(texts, convert_to_tensor=True) for texts in zip(*pairs, strict=True))
    best = model.similarity(queries, passages).argmax(1).tolist()
    return sum(i == found for i, found in enumerate(best)) / len(pairs)


def tune(model, pairs):
    """Moves a query towards its passage and away from the other passages of its batch."""
    settings = {"learning_rate": 2e-4, "warmup_steps": 0.1, "per_device_train_batch_size": 64, "num_train_epochs": 2}
    settings |= {"batch_sampler": "no_duplicates", "save_strategy": "no", "report_to": "none"}
    arguments = SentenceTransformerTrainingArguments("unused", **settings)
    data = Dataset.from_list([{"query": query, "passage": passage} for query, passage in pairs])
    SentenceTransformerTrainer(model, arguments, data, loss=MultipleNegativesRankingLoss(model)).train()


encoder, folder, tuned, query = sys.argv[1:]
pages = [list(pairs_of(page)) for page in sorted(Path(folder).rglob("*")) if page.suffix in (".md", ".txt")]
model = SentenceTransformer(tuned if Path(tuned).exists() else encoder)  # of a plain encoder, the mean of its outputs
if not Path(tuned).exists():
    model.max_seq_length = 128  # as in pre-training
    held_out = sum(pages[::10], [])
    untuned = accuracy(model, held_out)
    tune(model, [pair for i, page in enumerate(pages) if i % 10 for pair in page])
    print(f"own passage first of {len(held_out):,}: untuned {untuned:.1%}, tuned {accuracy(model, held_out):.1%}")
    model.save(tuned)
passages = [passage for page in pages for _, passage in page]
scores = model.similarity(model.encode(query), model.encode(passages))[0]
for i in scores.topk(min(3, len(passages))).indices.tolist():
    print(f"{scores[i]:.2f}  {passages[i][:200]}")

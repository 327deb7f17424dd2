"""Searches your own pages by meaning, with an exported encoder that is tuned on these pages first.

Needs `pip install "sentence-transformers[train]>=6"`, an encoder (`electra-fast export run --out model`), and a folder
of .md or .txt files, one per page:

    python examples/search.py model/encoder pages/ tuned/ "how do I resume a run?"

The pages themselves give the pairs to tune on: a heading and its text, or two passages in a row. Every tenth page is
left out of the tuning and shows what it gained. A second call finds the tuned model and only answers.
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
            title = heading[2] if heading[1] == "#" else title
            query = title if heading[1] == "#" else f"{title}: {heading[2]}"
            block = block[heading.end() :]
        if len(block) >= 50:  # shorter ones say too little to be found
            yield query, block.strip()
            query = block.strip()


def accuracy(model, pairs, best=1):
    """Returns for how many of the queries their own passage is among the `best` that are found."""
    queries, passages = (model.encode(texts, convert_to_tensor=True) for texts in zip(*pairs, strict=True))
    found = model.similarity(queries, passages).topk(min(best, len(pairs))).indices.tolist()
    return sum(i in row for i, row in enumerate(found)) / len(pairs)


def tune(model, pairs, epochs=2):
    """Moves a query towards its passage and away from the other passages of its batch."""
    settings = {"learning_rate": 2e-4, "warmup_steps": 0.1, "batch_sampler": "no_duplicates", "save_strategy": "no"}
    arguments = SentenceTransformerTrainingArguments(
        "unused", num_train_epochs=epochs, per_device_train_batch_size=64, report_to="none", **settings
    )
    data = Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*pairs, strict=True), strict=True)))
    SentenceTransformerTrainer(model, arguments, data, loss=MultipleNegativesRankingLoss(model)).train()


encoder, folder, tuned, query = sys.argv[1:]
pages = [list(pairs_of(page)) for page in sorted(Path(folder).rglob("*")) if page.suffix in (".md", ".txt")]
model = SentenceTransformer(tuned if Path(tuned).exists() else encoder)  # of a plain encoder, the mean of its outputs
if not Path(tuned).exists():
    model.max_seq_length = 128  # as in pre-training
    held_out = sum(pages[::10], [])
    before = accuracy(model, held_out)
    tune(model, [pair for i, page in enumerate(pages) if i % 10 for pair in page])
    print(f"right passage of {len(held_out):,} comes first: untuned {before:.1%}, tuned {accuracy(model, held_out):.1%}")
    model.save(tuned)
passages = [passage for page in pages for _, passage in page]
scores = model.similarity(model.encode(query), model.encode(passages))[0]
for i in scores.topk(min(3, len(passages))).indices.tolist():
    print(f"{scores[i]:.2f}  {passages[i][:200]}")

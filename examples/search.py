"""Searches your own pages by meaning, with an exported encoder that is tuned on these pages first.

    pip install "sentence-transformers[train]>=6"
    python examples/search.py model/encoder pages/ tuned/ "how do I resume a run?"

The .md or .txt files provide the training pairs: a heading and its text, or two successive passages. Every tenth file
is kept for evaluation and shows the gain. A second call loads tuned/ and only answers.
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
        text = block[heading.end() if heading else 0 :].strip()
        if len(text) >= 50:  # shorter ones are too vague to search for
            yield query, text
            query = text


def accuracy(model, pairs):
    """Returns the fraction of queries whose passage is among the first ten results."""
    queries, passages = zip(*pairs, strict=True)
    scores = model.similarity(model.encode(queries), model.encode(passages))  # cosines of mean-pooled embeddings
    scores -= 2 * scores.new_tensor([[query == passage for passage in passages] for query in queries])  # not itself
    return sum(i in best for i, best in enumerate(scores.topk(min(10, len(pairs))).indices.tolist())) / len(pairs)


def tune(model, pairs):
    """Moves a query towards its passage and away from the other passages of its batch."""
    settings = {"learning_rate": 2e-4, "warmup_steps": 0.1, "per_device_train_batch_size": 64, "num_train_epochs": 2}
    settings |= {"batch_sampler": "no_duplicates", "save_strategy": "no", "report_to": "none"}
    data = Dataset.from_list([{"query": query, "passage": passage} for query, passage in pairs])
    arguments = SentenceTransformerTrainingArguments("unused", **settings)
    SentenceTransformerTrainer(model, arguments, data, loss=MultipleNegativesRankingLoss(model)).train()


encoder, folder, tuned, query = sys.argv[1:]
pages = [list(pairs_of(page)) for page in sorted(Path(folder).rglob("*")) if page.suffix in (".md", ".txt")]
model = SentenceTransformer(tuned if Path(tuned).exists() else encoder)
held_out = sum(pages[::10], [])
if not Path(tuned).exists():
    model.max_seq_length = 128  # as in pre-training
    print(f"queries that find their passage in the first ten of {len(held_out):,}: {accuracy(model, held_out):.1%}")
    tune(model, [pair for i, page in enumerate(pages) if i % 10 for pair in page])
    print(f"after tuning: {accuracy(model, held_out):.1%}")
    model.save(tuned)
passages = [passage for _, passage in sum(pages, [])]
best = model.similarity(model.encode(query), model.encode(passages))[0].topk(min(3, len(passages)))
print(*(f"{score:.2f}  {passages[i][:200]}" for score, i in zip(*best, strict=True)), sep="\n")

"""Re-ranks what a keyword search finds, with a cross-encoder trained from an exported encoder.

Needs `pip install "sentence-transformers[train]>=6"`, an encoder (`electra-fast export run --out model`), and a .tsv
file of questions, each with the passage that answers it:

    python examples/rerank.py model/encoder questions.tsv reranker/ "who wrote the first compiler?"

A cross-encoder reads question and passage together. That is more exact than comparing embeddings (search.py), but too
slow for more than the first results of a fast search, here TF-IDF. It learns to tell the right passage from the wrong
ones that this search ranks highest. Every tenth question is left out of the training and shows what it gained.
"""

import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sklearn.feature_extraction.text import TfidfVectorizer

NUM_CANDIDATES, NUM_WRONG = 20, 4  # passages to re-rank; wrong passages per right one in training


encoder, file, tuned, query = sys.argv[1:]
lines = Path(file).read_text(encoding="utf-8").splitlines()
questions, answers = zip(*(line.split("\t") for line in lines), strict=True)
passages = list(dict.fromkeys(answers))
keywords = TfidfVectorizer(sublinear_tf=True)
index = keywords.fit_transform(passages)


def search(question):
    """Returns the passages with the question's rarest words, best first."""
    scores = (index @ keywords.transform([question]).T).toarray()[:, 0]
    return [passages[i] for i in scores.argsort()[::-1][:NUM_CANDIDATES]]


def rerank(question):
    """Returns what `search` finds in the order of the cross-encoder."""
    found = search(question)
    return [found[each["corpus_id"]] for each in model.rank(question, found)]


def mean_reciprocal_rank(method):
    """Returns the mean of 1 / rank of the right passage, 0 where it is not found, over the held-out questions."""
    pairs = [(method(question), answer) for question, answer in zip(questions[::10], answers[::10], strict=True)]
    return sum(1 / (1 + found.index(answer)) for found, answer in pairs if answer in found) / len(pairs)


model = CrossEncoder(tuned if Path(tuned).exists() else encoder, num_labels=1, max_length=256)
if not Path(tuned).exists():
    rows = []
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        wrong = [passage for passage in search(question) if passage != answer][:NUM_WRONG]
        texts = [answer, *wrong] if i % 10 else []
        rows += [{"question": question, "passage": text, "label": float(text == answer)} for text in texts]
    settings = {"learning_rate": 1e-4, "warmup_steps": 0.1, "save_strategy": "no", "report_to": "none"}
    arguments = CrossEncoderTrainingArguments("unused", num_train_epochs=1, per_device_train_batch_size=32, **settings)
    CrossEncoderTrainer(model, arguments, Dataset.from_list(rows), loss=BinaryCrossEntropyLoss(model)).train()
    before, after = mean_reciprocal_rank(search), mean_reciprocal_rank(rerank)
    print(f"mean reciprocal rank of held-out questions: keywords {before:.3f}, re-ranked {after:.3f}")
    model.save(tuned)
for passage in rerank(query)[:3]:
    print(passage[:200])

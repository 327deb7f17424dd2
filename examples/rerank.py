"""Re-ranks the results of a keyword search with a cross-encoder trained from an exported encoder.

    pip install "sentence-transformers[train]>=6"
    python examples/rerank.py model/encoder questions.tsv reranker/ "who wrote the first compiler?"

The file has a question per line, a tab, and the passage that answers it. A cross-encoder reads both together: more
exact than comparing embeddings (search.py), but too slow for more than the first results of a fast search, here TF-IDF.
It learns to separate right passages from the wrong passages that this search ranks highest. Every tenth question is
kept for evaluation.
"""

import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sklearn.feature_extraction.text import TfidfVectorizer

NUM_CANDIDATES = 20  # passages to re-rank
NUM_WRONG = 4  # wrong passages per right one in training

encoder, file, tuned, query = sys.argv[1:]
pairs = [line.split("\t") for line in Path(file).read_text(encoding="utf-8").splitlines()]
held_out = pairs[::10]
trained = [pair for i, pair in enumerate(pairs) if i % 10]
passages = list(dict.fromkeys(passage for _, passage in pairs))
keywords = TfidfVectorizer(sublinear_tf=True)
index = keywords.fit_transform(passages)


def search(question):
    """Returns the passages with the question's rarest words, best first."""
    scores = (index @ keywords.transform([question]).T).toarray()[:, 0]
    return [passages[i] for i in scores.argsort()[::-1][:NUM_CANDIDATES]]


def rerank(question):
    """Returns the results of `search` in the order of the cross-encoder."""
    results = search(question)
    return [results[rank["corpus_id"]] for rank in model.rank(question, results)]


def mean_reciprocal_rank(method):
    """Returns the mean of 1 / rank of the right passage (0 if it is missing) over the evaluation questions."""
    results = [(method(question), answer) for question, answer in held_out]
    return sum(1 / (1 + texts.index(answer)) for texts, answer in results if answer in texts) / len(results)


model = CrossEncoder(tuned if Path(tuned).exists() else encoder, num_labels=1, max_length=256)
if not Path(tuned).exists():
    rows = []
    for question, answer in trained:
        texts = [answer, *(passage for passage in search(question) if passage != answer)][: 1 + NUM_WRONG]
        rows += [{"question": question, "passage": text, "label": float(text == answer)} for text in texts]
    settings = {"learning_rate": 1e-4, "warmup_steps": 0.1, "per_device_train_batch_size": 32, "num_train_epochs": 1}
    arguments = CrossEncoderTrainingArguments("unused", save_strategy="no", report_to="none", **settings)
    CrossEncoderTrainer(model, arguments, Dataset.from_list(rows), loss=BinaryCrossEntropyLoss(model)).train()
    scores = [f"{method.__name__} {mean_reciprocal_rank(method):.3f}" for method in (search, rerank)]
    print("mean reciprocal rank:", *scores)
    model.save(tuned)
print(*(passage[:200] for passage in rerank(query)[:3]), sep="\n")

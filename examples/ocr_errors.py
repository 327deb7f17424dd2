"""Marks wrong words in scanned text: unknown words, and known words that do not fit their context.

Needs a run or an exported discriminator that was pre-trained on clean text of the same kind, this text (or another
source of known words), and a scanned chapter with its corrected text:

    python examples/ocr_errors.py run clean.txt chapter.txt chapter-corrected.txt 0.7 other-chapters.txt

0.7 is the precision to reach: the fraction of marked words that are wrong. The first half of the chapter determines the
lowest threshold with this precision, which then marks the other files. The second half measures precision and recall,
also for marking unknown words only.
"""

import difflib
import re
import sys
from pathlib import Path

import electra_fast as ef

model, clean, scanned, corrected, precision, *others = sys.argv[1:]
detector = ef.load(model)
known = set(re.findall(r"\w+", Path(clean).read_text(encoding="utf-8").lower()))


def read(path):
    """Returns a text and its words, without punctuation, with their probabilities of being wrong."""
    text = Path(path).read_text(encoding="utf-8").replace("-\n", "")  # joins words hyphenated at a line end
    words = [word for word in detector.detect([text])[0]["words"] if word["text"].isalnum()]
    return text, [word if word["text"].lower() in known else word | {"probability": 1} for word in words]


def precision_and_recall(threshold, words):
    """Returns the fraction of marked words that are wrong, and the fraction of wrong words that are marked."""
    marked = [word["wrong"] for word in words if word["probability"] >= threshold]
    return sum(marked) / max(1, len(marked)), sum(marked) / max(1, sum(word["wrong"] for word in words))


words = read(scanned)[1]
right = read(corrected)[1]
texts = [[word["text"] for word in version] for version in (words, right)]
for block in difflib.SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks():
    for word in words[block.a : block.a + block.size]:
        word["wrong"] = False
words = [{"wrong": True} | word for word in words]  # unless the corrected text has it
first = words[: len(words) // 2]
second = words[len(words) // 2 :]

thresholds = sorted({word["probability"] for word in first})
threshold = next((t for t in thresholds if precision_and_recall(t, first)[0] >= float(precision)), None)
if threshold is None:
    sys.exit(f"no threshold reaches a precision of {precision} in the first half of {scanned}: lower it")
print(f"{sum(word['wrong'] for word in second) / len(second):.2f} of the words are wrong")
print("unknown words: precision {:.2f}, recall {:.2f}".format(*precision_and_recall(1, second)))
print(f"threshold {threshold:.3f}:", "precision {:.2f}, recall {:.2f}".format(*precision_and_recall(threshold, second)))

for text, words in map(read, others):
    for word in reversed(words):
        if word["probability"] >= threshold:
            text = f"{text[: word['start']]}[{word['text']}]{text[word['end'] :]}"
    print(text)

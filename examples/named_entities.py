"""Finds names in text: fine-tunes an encoder on tagged sentences and prints the entities of new texts.

Needs a run or an exported encoder, and files with a word and its tag per line, as in CoNLL-2003, and a blank line
between sentences. Tagging schemes (IOB2, BILOU, ...) are recognized.

    python examples/named_entities.py run train.conll dev.conll names/ "Ada Lovelace worked in London."

A second call loads the finished model and only answers.
"""

import sys

import electra_fast as ef

model, train, dev, out, *texts = sys.argv[1:]
results = ef.finetune(model, task="tagging", train=train, dev=dev, out=out)
scores = results["tagging"]
print(f"{scores['metric']} of entities in {dev}: {scores['median']:.3f}")

tagger = ef.load(f"{out}/tagging/seed-0/model")
for answer in tagger.predict(texts):
    for span in answer["spans"]:
        print(f"{span['label']}\t{span['text']}\t{span['start']}-{span['end']}\t{span['score']:.2f}")

"""Sorts support tickets into queues, and leaves those that it is not sure of to a person.

Needs a run or an exported encoder, and past tickets with the columns `subject`, `body` and `queue` (.csv, .jsonl, ...):

    python examples/tickets.py train run tickets.csv work/
    tail -n 0 -F new.jsonl | python examples/tickets.py route work/ 0.9 > routed.jsonl

`train` prints how many tickets each threshold would route, and how many of these to the right queue. `route` reads a
ticket per line as it comes, as JSON with `subject` and `body`, and adds `queue` and `probability`: the queue is null
where the probability is below the threshold.
"""

import json
import sys
from pathlib import Path

import electra_fast as ef


def train(encoder, tickets, out):
    """Trains in cross-validation, for the numbers, and then the model to use."""
    settings = {"task": "classification", "train": tickets, "text": ["subject", "body"], "label": "queue"}
    # With calibration, about 90 % of the answers with a probability of 0.9 are right. Longer tickets are cut: a model
    # with that many positions can read more by {"finetune.sequence_length": 512}.
    settings["overrides"] = {"finetune.calibrate": True}
    # Five models; each predicts a fifth of the tickets, which it has not learned from.
    ef.finetune(encoder, out=f"{out}/folds", folds=5, **settings)
    # This one learns from nine tenths. The others choose its best step and its temperature.
    ef.finetune(encoder, out=f"{out}/final", **settings)

    files = Path(out).glob("folds/classification/fold-*/seed-0/predictions.dev.jsonl")
    lines = "".join(file.read_text(encoding="utf-8") for file in files).strip().split("\n")
    answers = [json.loads(line) for line in lines]
    print("threshold  routed  of these right")
    for threshold in (0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98):
        routed = [each for each in answers if max(each["scores"].values()) >= threshold]
        right = sum(each["label"] == each["gold"] for each in routed) / max(1, len(routed))
        print(f"{threshold:9.2f}  {len(routed) / len(answers):6.1%}  {right:14.1%}")
    print(f"each queue's precision and recall, and the surest errors: {out}/folds/classification/report.md")


def route(out, threshold):
    """Answers tickets from standard input."""
    model = ef.load(f"{out}/final/classification/seed-0/model")
    for line in sys.stdin:
        ticket = json.loads(line)
        [answer] = model.predict([(ticket["subject"], ticket["body"])])
        probability = answer["scores"][answer["label"]]
        queue = answer["label"] if probability >= float(threshold) else None
        print(json.dumps(ticket | {"queue": queue, "probability": probability}), flush=True)


command, *arguments = sys.argv[1:]
{"train": train, "route": route}[command](*arguments)

"""Routes support tickets to queues, and leaves uncertain ones to a person.

Needs a run or an exported encoder, and past tickets with the columns `subject`, `body` and `queue` (.csv, .jsonl, ...):

    python examples/tickets.py train run tickets.csv work/
    tail -n 0 -F new.jsonl | python examples/tickets.py route work/ 0.9 > routed.jsonl

`train` prints the fraction of tickets that each threshold would route, and how many of these go to the right queue.
`route` reads a ticket per line as it arrives, as JSON with `subject` and `body`, and adds `queue` and `probability`.
The queue is null if the probability is below the threshold.
"""

import json
import sys
from pathlib import Path

import electra_fast as ef


def train(encoder, tickets, out):
    """Estimates the accuracy by cross-validation, then trains the final model."""
    settings = {"task": "classification", "train": tickets, "text": ["subject", "body"], "label": "queue"}
    # With calibration, about 90 % of the answers with a probability of 0.9 are right. Long tickets are truncated; if
    # the model has enough positions, {"finetune.sequence_length": 512} reads more.
    settings["overrides"] = {"finetune.calibrate": True}
    # Five models, each of which predicts the fifth of the tickets that it was not trained on.
    ef.finetune(encoder, out=f"{out}/folds", folds=5, **settings)
    # The final model trains on nine tenths; the rest selects its best step and its temperature.
    ef.finetune(encoder, out=f"{out}/final", **settings)

    files = Path(out).glob("folds/classification/fold-*/seed-0/predictions.dev.jsonl")
    lines = "".join(file.read_text(encoding="utf-8") for file in files).strip().split("\n")
    answers = [json.loads(line) for line in lines]
    print("threshold  routed  of these right")
    for threshold in (0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98):
        routed = [answer for answer in answers if max(answer["scores"].values()) >= threshold]
        right = sum(answer["label"] == answer["gold"] for answer in routed) / max(1, len(routed))
        print(f"{threshold:9.2f}  {len(routed) / len(answers):6.1%}  {right:14.1%}")
    print(f"each queue's precision and recall, and the most confident errors: {out}/folds/classification/report.md")


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

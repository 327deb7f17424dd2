"""The methods of fine-tuning by the kind of task."""

from __future__ import annotations

from electra_fast.finetuning.classification import Classification
from electra_fast.finetuning.method import Method
from electra_fast.finetuning.question_answering import QuestionAnswering
from electra_fast.finetuning.tagging import Tagging

METHODS: dict[str, Method] = {
    "classification": Classification("classification"),
    "multi-label": Classification("multi-label"),
    "regression": Classification("regression"),
    "tagging": Tagging(),
    "question-answering": QuestionAnswering(),
}

"""The task types: one class per type, and the table that names them. `task_type` has the contract."""

from __future__ import annotations

from electra_fast.finetuning.tasks.classification import Classification
from electra_fast.finetuning.tasks.question_answering import QuestionAnswering
from electra_fast.finetuning.tasks.tagging import Tagging
from electra_fast.finetuning.tasks.task_type import Method

METHODS: dict[str, Method] = {
    "classification": Classification("classification"),
    "multi-label": Classification("multi-label"),
    "regression": Classification("regression"),
    "tagging": Tagging(),
    "question-answering": QuestionAnswering(),
}

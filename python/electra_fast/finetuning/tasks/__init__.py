"""The task types: a class per type, and the table of their names. `task_type` defines the contract."""

from __future__ import annotations

from electra_fast.finetuning.tasks.classification import Classification, MultiLabel
from electra_fast.finetuning.tasks.question_answering import QuestionAnswering
from electra_fast.finetuning.tasks.regression import Regression
from electra_fast.finetuning.tasks.tagging import Tagging
from electra_fast.finetuning.tasks.task_type import TaskType

TASK_TYPES: dict[str, TaskType] = {
    "classification": Classification(),
    "multi-label": MultiLabel(),
    "regression": Regression(),
    "tagging": Tagging(),
    "question-answering": QuestionAnswering(),
}

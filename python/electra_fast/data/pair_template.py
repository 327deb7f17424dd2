"""Templates by which tokenizers join the two texts of a pair, read from the post-processor in tokenizer.json.

Fine-tuning joins pairs in the same way, so that a fine-tuned model sees the same ids in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

Parts = list[tuple[Any, int]]


@dataclass(frozen=True)
class PairTemplate:
    """`[CLS] A [SEP] B [SEP]`, with one or two [SEP] between the texts; a single text is `[CLS] A [SEP]`.

    Args:
        num_separators: [SEP] tokens between the two texts. RoBERTa has two.
        second_type: Token type of the second text and its [SEP]; all others have type 0. RoBERTa has no type 1.
    """

    num_separators: int = 1
    second_type: int = 1

    @property
    def num_special(self) -> int:
        return self.num_separators + 2

    def parts(self, cls: Any, sep: Any) -> tuple[Parts, Parts]:
        """Returns the parts of a single text and of a pair, each with its token type; "A" and "B" are the texts."""
        single: Parts = [(cls, 0), ("A", 0), (sep, 0)]
        second: Parts = [("B", self.second_type), (sep, self.second_type)]
        return single, [*single, *single[2:] * (self.num_separators - 1), *second]


BERT = PairTemplate()
ROBERTA = PairTemplate(num_separators=2, second_type=0)


def template_of(post_processor: Mapping[str, Any] | None, cls: int, sep: int) -> PairTemplate | None:
    """Returns the template of a post-processor (BERT's if it is None), or None if it joins texts differently."""
    if post_processor is None:
        return BERT
    kind = post_processor["type"]
    if kind == "Sequence":  # byte-level steps only trim offsets
        steps = [step for step in post_processor["processors"] if step["type"] != "ByteLevel"]
        return template_of(steps[0], cls, sep) if len(steps) == 1 else None
    if kind in ("BertProcessing", "RobertaProcessing"):
        template = BERT if kind == "BertProcessing" else ROBERTA
        return template if (post_processor["cls"][1], post_processor["sep"][1]) == (cls, sep) else None
    if kind != "TemplateProcessing":
        return None
    ids = {name: token["ids"] for name, token in post_processor["special_tokens"].items()}
    wanted = tuple([_part(ids, part) for part in post_processor[name]] for name in ("single", "pair"))
    templates = (PairTemplate(number, types) for number, types in product((1, 2), (0, 1)))
    return next((template for template in templates if template.parts([cls], [sep]) == wanted), None)


def _part(ids: Mapping[str, list[int]], part: Mapping[str, Any]) -> tuple[Any, int]:
    ((kind, value),) = part.items()
    return (value["id"] if kind == "Sequence" else ids[value["id"]]), value["type_id"]


def bert_post_processor(cls: tuple[str, int], sep: tuple[str, int]) -> dict[str, Any]:
    """Returns the post-processor of BERT's template for special tokens with these names and ids."""
    single, pair = (
        [
            {"Sequence" if part in ("A", "B") else "SpecialToken": {"id": part, "type_id": token_type}}
            for part, token_type in parts
        ]
        for parts in BERT.parts(cls[0], sep[0])
    )
    special = {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in (cls, sep)}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

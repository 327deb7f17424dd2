"""The model card of an exported folder: a README.md with Hugging Face's front matter.

`export` reads the source's record of the model's training, its `Origin`. The card states only this and the
configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from electra_fast.config.config import Config
from electra_fast.errors import InputError
from electra_fast.huggingface.config import ONNX_FILE, class_of, role_shape
from electra_fast.messages import printable
from electra_fast.objectives import objective_of


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model's training, as far as its source records it."""

    token_type_1_trained: bool  # in this run or before an import
    steps: int = 0  # completed steps; 0 for a folder or an imported run, which record no training
    num_steps: int = 0  # steps of the whole run
    imported: bool = False  # True if the run started from Hugging Face folders
    tokens: int | None = None
    corpus: str | None = None  # content hash
    comparable_auc: tuple[int, float] | None = None  # step and `unigram_auc` of the last evaluation


def metadata(
    languages: Sequence[str] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
    base_model: str | None = None,
) -> dict[str, Any]:
    """Returns the entries of `front_matter` about a model's origin.

    Raises ValueError for an invalid language code, license identifier or name on the Hub.
    """
    for code in languages:
        if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code", code):
            raise InputError(f"language = {code!r}: must be a code such as hu, en or zh-Hant")
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"license = {license!r}: must be an identifier such as apache-2.0, mit or cc-by-4.0")
    for name in (*datasets, *([] if base_model is None else [base_model])):
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
            raise InputError(f"{name!r}: must be a name on the Hugging Face Hub, such as owner/name")
    entries = {"language": [*languages], "license": license, "datasets": [*datasets], "base_model": base_model}
    return {name: value for name, value in entries.items() if value}


def front_matter(fields: Mapping[str, Any]) -> str:
    """Returns the block of YAML at the head of a card.

    Values are written as JSON, which is also YAML: without quotes, YAML reads the code of Norwegian, no, as false.
    """
    lines = (f"{name}: {printable(json.dumps(value, ensure_ascii=False))}" for name, value in fields.items())
    return "\n".join(("---", *lines, "---"))


def model_card(
    config: Config,
    role: str,
    num_parameters: tuple[int, int],
    origin: Origin,
    about: Mapping[str, Any] | None = None,
    *,
    headless: bool = False,
    has_onnx: bool = False,
) -> str:
    """Returns the README.md for a role's folder, or for its encoder alone.

    `num_parameters` are the counts for the encoder and for the whole model; `about` comes from `metadata`.
    """
    architecture = class_of(config.model.architecture, role, headless)
    title, summary = objective_of(config).describe(role)
    title += ", without its head" if headless else ""
    sections = (
        front_matter({**(about or {}), **_fields(config, role, headless)}),
        f"# {title}\n\n{summary} Class in `transformers`: `{architecture}`.",
        "## Model\n\n" + "\n".join(_sizes(config, role, num_parameters, origin)),
        "## Training\n\n" + "\n".join(_training(config, role, origin)),
        "## Use\n\n" + _use(architecture, role, headless, has_onnx),
        _token_types() if config.model.architecture == "bert" and not origin.token_type_1_trained else "",
    )
    return "\n\n".join(filter(None, sections)) + "\n"


def _fields(config: Config, role: str, headless: bool) -> dict[str, Any]:
    task = {"discriminator": "replaced-token-detection", "encoder": "masked-lm", "generator": "fill-mask"}[role]
    architecture = config.model.architecture
    # The pipeline would skip the enhanced mask decoder of `deberta`.
    has_fill = role == "encoder" or (role == "generator" and architecture != "deberta")
    pipeline = "feature-extraction" if headless else "fill-mask" if has_fill else None
    if role == "discriminator" and architecture == "modernbert" and not headless:
        pipeline = "token-classification"
    model_type = {"bert": "electra", "modernbert": "modernbert", "deberta": "deberta-v2"}[architecture]
    tags = [model_type, "pretraining", task]
    return {"library_name": "transformers", **({"pipeline_tag": pipeline} if pipeline else {}), "tags": tags}


def _sizes(config: Config, role: str, num_parameters: tuple[int, int], origin: Origin) -> Iterator[str]:
    shape = role_shape(config, role)
    length = config.data.sequence_length
    encoder, whole = num_parameters
    yield f"- {encoder:,} parameters" + (f" in `AutoModel`, {whole:,} with the head" if whole > encoder else "")
    yield f"- {shape.num_layers} layers of width {shape.hidden_size}, {shape.num_heads} attention heads"
    yield f"- feed-forward width {shape.intermediate_size}, embeddings of {shape.embedding_size}"
    yield f"- vocabulary of {shape.vocab_size:,} entries, at most {shape.max_positions:,} positions"
    if origin.steps and length < shape.max_positions:
        where = " here" if origin.imported else ""
        yield f"- trained on rows of {length:,} tokens; positions from {length:,} on were not trained{where}"


def _training(config: Config, role: str, origin: Origin) -> Iterator[str]:
    if not origin.steps:
        yield "Exported from Hugging Face folders; their model cards describe the training."
        return
    data = config.data
    optimizer = config.optimizer
    train = config.train
    rows = f"{train.batch_size:,} rows of {data.sequence_length} tokens"
    yield f"- objective `{config.objective.name}`, {origin.steps:,} of {origin.num_steps:,} steps of {rows}"
    if origin.steps < origin.num_steps:
        yield "- exported before its training was finished"
    if origin.imported:
        yield "- continued from an imported model, whose earlier training is not counted here"
    if origin.tokens is not None:
        yield f"- {origin.tokens:,} tokens seen"
    if origin.comparable_auc is not None and role == "discriminator":
        step, auc = origin.comparable_auc
        use = "not a measure of progress" if origin.imported else "comparable between models on the same text"
        yield (
            f"- AUC {auc:.3f} on the validation set, with replacements sampled by token frequency, at step {step:,} "
            f"(`unigram_auc`, {use})"
        )
    if origin.corpus is not None:
        yield f"- corpus with content hash `{printable(origin.corpus)}`"
    yield f"- masking `{data.masking}` for {data.mask_prob:.0%} of the tokens, packing `{data.packing}`"
    yield (
        f"- optimizer `{optimizer.name}`, peak learning rate {optimizer.learning_rate:g}, "
        f"{optimizer.warmup_steps:,} steps of warmup, weight decay {optimizer.weight_decay:g}"
    )
    yield f"- seed {train.seed}, exported by electra-fast {version('electra-fast')}"


_LOADING = """\
from transformers import AutoTokenizer, {name}
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = {name}.from_pretrained("path/to/this/folder"{more})
"""
_EMBEDDING = """\
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])
"""
_DETECTING = """\
inputs = tokenizer("The cats sat on the mat.", return_tensors="pt")
probabilities = model(**inputs).logits.sigmoid()[0].tolist()
"""
_DETECTING_WORDS = """\
import electra_fast
results = electra_fast.load("path/to/this/folder").detect(["The cats sat on the mat."])
"""
_TAGGING = """\
from transformers import pipeline
detect = pipeline("token-classification", "path/to/this/folder", ignore_labels=[])
results = detect("The cats sat on the mat.")
"""
_FILLING = """\
from transformers import pipeline
fill = pipeline("fill-mask", "path/to/this/folder")
candidates = fill(f"The cats {fill.tokenizer.mask_token} on the mat.")
"""


_FILLING_DEBERTA = """\
import electra_fast
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
inputs = tokenizer(f"The cats {tokenizer.mask_token} on the mat.", return_tensors="pt")
logits = electra_fast.load("path/to/this/folder").generator_logits(**inputs)
candidates = tokenizer.batch_decode(logits[inputs.input_ids == tokenizer.mask_token_id].topk(5).indices.T)
"""


def _use(architecture: str, role: str, headless: bool, has_onnx: bool) -> str:
    if headless:
        number = ", num_labels=2"
        parts = [
            "To fine-tune the encoder with a new head, here for two classes:",
            _LOADING.format(name="AutoModelForSequenceClassification", more=number),
            "The mean of the last hidden states is an embedding of a text. Embeddings are comparable only after "
            "training on pairs of texts:",
            _EMBEDDING,
        ]
    elif role == "discriminator":
        of_tokens = _TAGGING if architecture.startswith("Modern") else _LOADING + _DETECTING
        is_deberta = architecture.startswith("Deberta")
        parts = [
            "No class of `transformers` has the head, `mask_predictions`. " * is_deberta
            + f"To compute the probability that each {'word' if is_deberta else 'token'} was replaced:",
            _DETECTING_WORDS if is_deberta else of_tokens.format(name=architecture, more=""),
            "For probabilities per word, run `electra-fast detect path/to/this/folder FILE`. For fine-tuning, use the "
            "folder encoder/ of the same export.",
        ]
    elif role == "generator" and architecture.startswith("Deberta"):
        parts = [
            "`transformers` lacks the enhanced mask decoder with which this model was trained, so the logits of its "
            "class differ. To predict the most likely tokens for a mask:",
            _FILLING_DEBERTA,
        ]
    else:
        parts = ["To predict the most likely tokens for a mask:", _FILLING]
    if has_onnx:
        output = "logits" if role == "discriminator" and not headless else "last hidden states"
        parts.append(f"`{ONNX_FILE}` computes the same {output} with onnxruntime.")
    return "\n\n".join(f"```python\n{part}```" if part.endswith("\n") else part for part in parts)


def _token_types() -> str:
    return (
        "## Token types\n\nToken type 1 never occurred in training. Its embedding is a copy of token type 0's, "
        "so that fine-tuning on text pairs starts from trained weights."
    )

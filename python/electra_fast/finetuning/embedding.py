"""`TextEncoder`: a vector per text, as sentence-transformers computes it with the same encoder.

Shapes: n or N texts, T tokens of the flat buffer, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from electra_fast.config.config import AUTO, ModelConfig
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.encoding import encode
from electra_fast.finetuning.inference import Inference, choose_inference
from electra_fast.finetuning.model import EncoderWithHead, Inputs
from electra_fast.finetuning.readers.rows import check_unicode
from electra_fast.finetuning.readers.table_formats import is_table
from electra_fast.huggingface.sentence_settings import Pooling, SentenceSettings
from electra_fast.messages import say
from electra_fast.model.compute import ComputeConfig
from electra_fast.progress import EncodingProgress


class PooledEncoder(EncoderWithHead):
    """An encoder whose predictions are a vector per text."""

    def __init__(self, shape: ModelConfig, parts: nn.Module, pooling: Pooling) -> None:
        with torch.device("meta"):
            super().__init__(shape, nn.Identity())
        for name in ("embeddings", "encoder"):
            self.add_module(name, parts.get_submodule(name))
        self.only_first = pooling == "cls"

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """Returns vectors, fp32 [n, D]."""
        hidden = self.hidden_states(inputs, compute).float()
        if self.only_first:
            return (hidden,)
        counts_n1 = inputs.by_example(hidden.new_ones(len(hidden), 1), 0.0).sum(1)
        return (inputs.by_example(hidden, 0.0).sum(1) / counts_n1,)


class TextEncoder:
    """A model that reads texts: its encoder on a device, with its tokenizer."""

    def __init__(
        self,
        shape: ModelConfig,
        parts: nn.Module,
        tokenizer: Tokenizer,
        sentences: SentenceSettings,
        device: torch.device,
        precision: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.device = device
        self._shape = shape
        self._parts = parts
        self._sentences = sentences
        self._precision = precision
        self._pooled: dict[str, Inference] = {}

    @property
    def max_length(self) -> int:
        """The most tokens of a text that `encode` reads, [CLS] and [SEP] included."""
        return min(self._shape.max_positions, self._sentences.max_length or self._shape.max_positions)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool = False,
        progress: bool = True,
    ) -> NDArray[np.float32]:
        """Returns a vector per text, float32 [N, D], in their order; of a single text, [D].

        The vectors are those of sentence-transformers for the same folder or the export of this run, in fp32 unless the
        model was loaded with another precision. Of a longer text, the first `max_length` tokens count. An encoder that
        was not tuned for it, by `examples/search.py` or otherwise, is poor at comparing texts.

        Args:
            texts: The texts: a list, a column of a table, or anything else that yields strings.
            pooling: `mean` over all tokens, [CLS] and [SEP] among them, or `cls`, the hidden state of [CLS]. By default
                the one that sentence-transformers saved with the model, or else `mean`.
            normalize: Scale each vector to length 1, so that products are cosines.
            progress: Show progress on standard error or in a notebook if it takes more than seconds.

        Raises:
            ValueError: `texts` are something else; the message names the first that is no string.
        """
        if isinstance(texts, str):
            vectors: NDArray[np.float32] = self.encode([texts], pooling=pooling, normalize=normalize, progress=False)[0]
            return vectors
        pooling = pooling or self._sentences.pooling
        if pooling not in get_args(Pooling):
            raise InputError(f"pooling = {pooling!r}: must be one of {', '.join(get_args(Pooling))}")
        texts = checked_texts(texts, "encode")
        read = [(self._sentences.prompt + text,) for text in texts]
        read = [(text.lower(),) for (text,) in read] if self._sentences.lowercase else read
        encoded = encode(self.tokenizer, read, self.max_length)
        if encoded.num_truncated:
            number = f"{encoded.num_truncated:,} of {len(texts):,} texts"
            say(f"encode: {number} are longer than {self.max_length:,} tokens, and only their beginning is read")
        vectors = np.empty((len(texts), self._shape.hidden_size), np.float32)
        with EncodingProgress("encode", len(encoded.ids), shown=progress) as shown:
            for examples, part, (tensor,) in self._inference_of(pooling).batches(encoded):
                found = tensor.cpu().numpy()
                if normalize or self._sentences.normalize:
                    found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
                vectors[examples[part.examples]] = found
                shown.advance(part.num_tokens)
        return vectors

    def _inference_of(self, pooling: Pooling) -> Inference:
        if pooling not in self._pooled:
            model = PooledEncoder(self._shape, self._parts, pooling).eval()
            precision = "fp32" if self._precision == AUTO else self._precision
            self._pooled[pooling], _ = choose_inference(model, self.device, precision)
        return self._pooled[pooling]


def checked_texts(texts: Any, caller: str) -> list[str]:
    """Returns texts as a list. Raises InputError for anything else, naming the first that is not a text."""
    if isinstance(texts, (str, bytes, Mapping)):
        raise InputError(f"{caller} takes a list of texts; put a single one into a list")
    if is_table(texts) and not isinstance(texts, (list, tuple)):
        raise InputError(f"{caller} takes a list of texts; give one column of the table")
    found = list(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise InputError(f"example {number} is {text!r}; it must be a text")
        check_unicode(f"example {number}: ", text)
    return found

"""`TextEncoder`: one vector per text, equal to the vector of sentence-transformers with the same encoder.

Shapes: n or N texts, T tokens in the flat buffer, D hidden.
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
    """An encoder that predicts one vector per text."""

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
    """An encoder on a device, with its tokenizer."""

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
        """Maximum number of tokens of a text that `encode` reads, including [CLS] and [SEP]."""
        return min(self._shape.max_positions, self._sentences.max_length or self._shape.max_positions)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool = False,
        progress: bool = True,
    ) -> NDArray[np.float32]:
        """Returns one vector per text, float32 [N, D], in the order of the texts; for a single text, [D].

        The vectors equal the output of sentence-transformers for the same folder or the export of this run. They are
        computed in fp32 unless the model was loaded with another precision. Longer texts are truncated to `max_length`
        tokens. An encoder is poor at comparing texts until it is tuned for that, for example by `examples/search.py`.

        Args:
            texts: The texts: a list, a column of a table, or another iterable of strings.
            pooling: `mean` over all tokens, including [CLS] and [SEP], or `cls`, the hidden state of [CLS]. The default
                is the pooling that sentence-transformers saved with the model, or `mean`.
            normalize: Scale each vector to length 1, so that dot products are cosines.
            progress: Show progress on standard error or in a notebook if encoding takes more than a few seconds.

        Raises:
            ValueError: `texts` is not an iterable of strings; the message names the first other item.
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
            truncated = f"truncated {encoded.num_truncated:,} of {len(texts):,} texts"
            say(f"encode: {truncated} to the model's maximum of {self.max_length:,} tokens")
        vectors = np.empty((len(texts), self._shape.hidden_size), np.float32)
        with EncodingProgress("encode", len(encoded.ids), shown=progress) as shown:
            for examples, part, (tensor,) in self._inference_of(pooling).batches(encoded):
                batch_vectors = tensor.cpu().numpy()
                if normalize or self._sentences.normalize:
                    norms = np.linalg.norm(batch_vectors, axis=1, keepdims=True)
                    batch_vectors = batch_vectors / np.maximum(norms, 1e-12)
                vectors[examples[part.examples]] = batch_vectors
                shown.advance(part.num_tokens)
        return vectors

    def _inference_of(self, pooling: Pooling) -> Inference:
        if pooling not in self._pooled:
            model = PooledEncoder(self._shape, self._parts, pooling).eval()
            precision = "fp32" if self._precision == AUTO else self._precision
            self._pooled[pooling], _ = choose_inference(model, self.device, precision)
        return self._pooled[pooling]


def checked_texts(texts: Any, caller: str) -> list[str]:
    """Returns texts as a list. Raises InputError that names the first item that is not a string."""
    if isinstance(texts, (str, bytes, Mapping)):
        raise InputError(f"{caller} takes a list of texts; put a single text into a list")
    if is_table(texts) and not isinstance(texts, (list, tuple)):
        raise InputError(f"{caller} takes a list of texts; pass one column of the table")
    checked = list(texts)
    for number, text in enumerate(checked):
        if not isinstance(text, str):
            raise InputError(f"example {number} = {text!r}: must be a string")
        check_unicode(f"example {number}: ", text)
    return checked

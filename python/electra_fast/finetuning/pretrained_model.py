"""`PretrainedModel`: a pre-trained model for use from Python."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from electra_fast.config.config import AUTO, Config
from electra_fast.data.corpus import Tokenizer
from electra_fast.finetuning.embedding import TextEncoder
from electra_fast.finetuning.error_detection import ErrorDetector, read_detector
from electra_fast.finetuning.scoring import TextScorer
from electra_fast.finetuning.task import Prediction
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.folder import read_model
from electra_fast.huggingface.sentence_settings import read_sentence_settings
from electra_fast.huggingface.source import checkpoint_of
from electra_fast.huggingface.tokenizer import tokenizer_length
from electra_fast.model.compute import choose_device
from electra_fast.model.layers import Embeddings
from electra_fast.model.model import Electra, Encoder


class PretrainedModel(TextEncoder):
    """A pre-trained model: computes one vector per text and, if it has the heads, logits, scores and errors in text."""

    def __init__(self, path: str | Path, *, device: str = AUTO, precision: str = AUTO) -> None:
        self.path = Path(path).resolve()
        encoder = load_encoder(self.path)
        torch_device = choose_device(device)
        # A run and its export read as many tokens as the encoder has positions.
        length = tokenizer_length(encoder.tokenizer) if checkpoint_of(self.path) is None else None
        sentences = read_sentence_settings(self.path, length)
        parts = nn.ModuleDict({"embeddings": Embeddings(encoder.shape), "encoder": Encoder(encoder.shape)})
        parts.load_state_dict(encoder.state)
        super().__init__(
            encoder.shape,
            parts.to(torch_device).eval(),
            Tokenizer(encoder.tokenizer),
            sentences,
            torch_device,
            precision,
        )

    def __repr__(self) -> str:
        shape = self._shape
        size = sum(parameter.numel() for parameter in self._parts.parameters()) / 1e6
        sizes = f"{shape.num_layers} layers of {shape.hidden_size}, {size:.2f} M parameters without heads"
        kind = f"{shape.architecture}, {sizes}, up to {self.max_length} tokens, on {self.device}"
        return f"{type(self).__name__}: {self.path}: {kind}"

    @functools.cached_property
    def model(self) -> Electra:
        """The networks with their heads, a `torch.nn.Module` in fp32, loaded on first use.

        Raises ValueError if the folder has only an encoder, or heads that are not for pre-training.
        """
        return read_model(self.path).to(self.device)

    @property
    def config(self) -> Config:
        """The configuration of the run, or of the folder's config.json."""
        return self.model.config

    @torch.no_grad()
    def discriminator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns replaced-token logits as `transformers` computes them; integer [B, L] → fp32 [B, L].

        Ids are from the model's tokenizer, with [CLS] and [SEP]; the mask is 1 on tokens and 0 on padding. For
        gradients, call the same method of `model`. Raises ValueError if there is no discriminator.
        """
        return self.model.discriminator_logits(*self._to_device(input_ids, attention_mask, token_type_ids))

    @torch.no_grad()
    def generator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns vocabulary logits; integer [B, L] → fp32 [B, L, V]. See `discriminator_logits`."""
        return self.model.generator_logits(*self._to_device(input_ids, attention_mask, token_type_ids))

    def detect(self, texts: Iterable[str], threshold: float = 0.5) -> list[Prediction]:
        """Finds words that do not belong, such as typing errors, with the discriminator; needs no fine-tuning.

        Returns one answer per text, in order: `{"score": x, "errors": [...], "words": [...]}`. `words` has all words in
        order, each as `{"text", "start", "end", "probability"}`, and `errors` has the words that reach the threshold.
        `start` and `end` count code points, so `text[start:end]` is the word. The tokenizer's rules delimit words: for
        BERT's, a run of letters and digits, or a punctuation mark. A word's probability is the probability that any of
        its tokens is replaced, assuming independence; the maximum over its tokens finds fewer errors (bench/LOG.md).
        `score` is the mean over the words, the expected fraction of wrong words; 0 for a text without words.

        Args:
            texts: The texts. Texts longer than the rows of pre-training are split into chunks that overlap by half.
            threshold: Minimum probability of an error, 0 to 1.

        Raises:
            ValueError: There is no discriminator, or `texts` is not an iterable of strings.
        """
        return self._detector.predict(texts, threshold)

    def score(self, texts: Iterable[str], kind: str | None = None, *, progress: bool = True) -> NDArray[np.float64]:
        """Scores how well the words of each text fit together, without training; float64 [N], in order.

        Higher is better. A score is a sum over tokens, so compare only texts of similar length, such as two versions of
        a sentence. Kinds: `discriminator`, the log-probability that each token is original; `both`, this plus a
        fiftieth of `generator`; `corrective`, the log-probability of each token by the corrective head of a run of the
        recipe `modern`, or by the encoder of `replace-mlm`; `generator`, the log-probability of each token while it is
        masked (the pseudo-log-likelihood of a masked language model, which reads a text once per token). Computes in
        fp32 unless the model was loaded with another precision.

        Args:
            texts: The texts, each with at least 1 token and at most as many as the model has positions.
            kind: The default is the first of these kinds that the model has.
            progress: Show progress on standard error or in a notebook if scoring takes more than a few seconds.

        Raises:
            ValueError: The model lacks the heads for `kind`, or a text is empty, too long or not a string.
        """
        kind = kind or self._scorer.kinds[0]
        return self._scorer.score(texts, (kind,), "example {}".format, progress=progress)[kind]

    @functools.cached_property
    def _scorer(self) -> TextScorer:
        return TextScorer(self.path, str(self.device), self._precision)

    @functools.cached_property
    def _detector(self) -> ErrorDetector:
        return read_detector(self.path, str(self.device), self._precision)

    def _to_device(self, *tensors: Tensor | None) -> Iterator[Any]:
        """Yields tensors on the device; None stays None."""
        return (tensor if tensor is None else torch.as_tensor(tensor, device=self.device) for tensor in tensors)

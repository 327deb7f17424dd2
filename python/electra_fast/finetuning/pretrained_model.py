"""A pre-trained model in use: `PretrainedModel`."""

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
    """A pre-trained model: a vector per text and, if it has such heads, logits and errors in text."""

    def __init__(self, path: str | Path, *, device: str = AUTO, precision: str = AUTO) -> None:
        self.path = Path(path).resolve()
        encoder = load_encoder(self.path)
        on = choose_device(device)
        # A run reads as many tokens as it has positions, and so does its export.
        length = tokenizer_length(encoder.tokenizer) if checkpoint_of(self.path) is None else None
        sentences = read_sentence_settings(self.path, length)
        parts = nn.ModuleDict({"embeddings": Embeddings(encoder.shape), "encoder": Encoder(encoder.shape)})
        parts.load_state_dict(encoder.state)
        super().__init__(encoder.shape, parts.to(on).eval(), Tokenizer(encoder.tokenizer), sentences, on, precision)

    def __repr__(self) -> str:
        shape = self._shape
        size = sum(each.numel() for each in self._parts.parameters()) / 1e6
        sizes = f"{shape.num_layers} layers of {shape.hidden_size}, {size:.2f} M parameters without heads"
        kind = f"{shape.architecture}, {sizes}, up to {self.max_length} tokens, on {self.device}"
        return f"{type(self).__name__}: {self.path}: {kind}"

    @functools.cached_property
    def model(self) -> Electra:
        """The networks with their heads, a `torch.nn.Module` in fp32, loaded when first used.

        Raises ValueError if the folder has an encoder alone, or heads that are not those of pre-training.
        """
        return read_model(self.path).to(self.device)

    @property
    def config(self) -> Config:
        """The configuration: that of the run, or what the folder's own config.json tells."""
        return self.model.config

    @torch.no_grad()
    def discriminator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns replaced-token logits as `transformers` computes them; integer [B, L] → fp32 [B, L].

        Ids are those of the model's own tokenizer, with [CLS] and [SEP]; the mask is 1 at tokens and 0 at padding. For
        gradients, call the same method of `model`. Raises ValueError if there is no discriminator.
        """
        return self.model.discriminator_logits(*self._placed(input_ids, attention_mask, token_type_ids))

    @torch.no_grad()
    def generator_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns vocabulary logits as `transformers` computes them; integer [B, L] → fp32 [B, L, V].

        As `discriminator_logits`, of the generator.
        """
        return self.model.generator_logits(*self._placed(input_ids, attention_mask, token_type_ids))

    def detect(self, texts: Iterable[str], threshold: float = 0.5) -> list[Prediction]:
        """Finds words that do not belong, such as typing errors, by the discriminator; needs no fine-tuning.

        Returns an answer per text, in their order: `{"score": x, "errors": [...], "words": [...]}`. `words` has all
        words in order, each as `{"text", "start", "end", "probability"}`, `errors` those that reach the threshold.
        `start` and `end` count code points, so that `text[start:end]` is the word. The tokenizer's rules delimit words:
        for BERT's, a run of letters and digits, or a punctuation mark. A word's probability is that any of its tokens
        is replaced, assuming independence; the highest of them finds fewer errors (bench/LOG.md). `score` is the mean
        over the words, the fraction expected not to belong; 0 for a text without words.

        Args:
            texts: The texts. Longer ones than in pre-training are read in chunks that overlap by half.
            threshold: Probability from which a word counts as an error, 0 to 1.

        Raises:
            ValueError: There is no discriminator, or the texts are something else.
        """
        return self._detector.predict(texts, threshold)

    def score(self, texts: Iterable[str], kind: str | None = None, *, progress: bool = True) -> NDArray[np.float64]:
        """Scores how well the words of each text fit together, without training; float64 [N], in their order.

        Higher is better. A score is a sum over tokens, so that it compares texts of similar lengths, such as two
        versions of a sentence. The kinds: `discriminator`, the log-probability that each token is original; `both`,
        this plus a fiftieth of `generator`; `corrective`, the log-probability of each token by the corrective head that
        a run of the recipe `modern` has, or by the encoder of `replace-mlm`; `generator`, the log-probability of each
        token where it is masked: the pseudo-log-likelihood of a masked language model, for which a text is read as
        often as it has tokens. In fp32 unless the model was loaded with another precision.

        Args:
            texts: The texts, each of 1 token to as many as the model has positions.
            kind: By default the first of these that the model has.
            progress: Show progress on standard error or in a notebook if it takes more than seconds.

        Raises:
            ValueError: The model lacks heads for it, or the texts are empty, too long or something else.
        """
        kind = kind or self._scorer.kinds[0]
        return self._scorer.score(texts, (kind,), "example {}".format, progress=progress)[kind]

    @functools.cached_property
    def _scorer(self) -> TextScorer:
        return TextScorer(self.path, str(self.device), self._precision)

    @functools.cached_property
    def _detector(self) -> ErrorDetector:
        return read_detector(self.path, str(self.device), self._precision)

    def _placed(self, *tensors: Tensor | None) -> Iterator[Any]:
        """Yields tensors on the device, and None for those that are not given."""
        return (each if each is None else torch.as_tensor(each, device=self.device) for each in tensors)

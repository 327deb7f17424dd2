"""The masked language models of `transformers` that `recipes.py` compares with, trained by its Trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import electra_fast as ef
from electra_fast.data.corpus import write_tokenizer
from electra_fast.distributed.step_processes import keep_freed_memory


class Chunks(torch.utils.data.Dataset[dict[str, Any]]):
    """Concatenated documents, each as [CLS] document [SEP], cut into equal rows like `group_texts` of `run_mlm.py`."""

    def __init__(self, corpus: str | Path, length: int) -> None:
        opened = ef.Corpus(corpus)
        cls, sep = ([opened.special_tokens[name]] for name in ("cls", "sep"))
        ids = np.concatenate([part for document in opened for part in (cls, document, sep)]).astype(np.int32)
        self.ids_BL = ids[: len(ids) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.ids_BL)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.ids_BL[row].tolist()}


def make_model(name: str, config: ef.Config, tokenizer: Any) -> Any:
    import transformers

    transformers.set_seed(config.train.seed)
    shape = config.model
    cls = getattr(transformers, name)
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "cls", "sep")}
    if name == "ModernBertForMaskedLM":
        special |= {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    sizes = cls.config_class(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        **special,
    )
    return cls(sizes)


def train(name: str, config: ef.Config, num_steps: int, corpus: str | Path, out: Path) -> None:
    """Trains for all of a configuration's steps, or none if `num_steps` is 0; writes `out/model` for `finetune`.

    Resumes from its last checkpoint. Memory is allocated as in our own training, which makes the Trainer up to 1.6
    times as fast (LOG.md).
    """
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

    torch.ones(1 << 22).sin()  # threads that begin after the next call would share one arena of memory
    keep_freed_memory()
    write_tokenizer(out / "tokenizer", ef.Tokenizer.of(ef.Corpus(corpus)), config.model.max_positions)
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    config = config.resolved()
    arguments = TrainingArguments(
        str(out / "checkpoints"),
        max_steps=config.train.steps,
        per_device_train_batch_size=config.train.batch_size,
        learning_rate=config.optimizer.learning_rate,
        weight_decay=config.optimizer.weight_decay,
        warmup_steps=config.optimizer.warmup_steps,
        bf16=config.train.precision == "bf16",
        use_cpu=True,
        seed=config.train.seed,
        save_steps=config.train.checkpoint_every,
        save_total_limit=1,
        logging_steps=config.train.log_every,
        report_to="none",
        disable_tqdm=True,
    )
    model = make_model(name, config, tokenizer)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=config.data.mask_prob)
    if num_steps:
        rows = Chunks(corpus, config.data.sequence_length)
        trainer = Trainer(model, arguments, collate, rows)
        trainer.train(resume_from_checkpoint=any((out / "checkpoints").glob("checkpoint-*")))
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

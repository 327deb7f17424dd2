"""The masked language models of `transformers` that `recipes.py` compares with, trained by its Trainer.

    python bench/recipe_trainer.py CORPUS electra-fast|BertForMaskedLM|ModernBertForMaskedLM [--precision bf16|fp32]

prints how many tokens per second the preset `mini` trains with here, in all threads. One model per process, for each
leaves settings behind that change the speed of the next. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import processor

import electra_fast as ef
from electra_fast.huggingface.tokenizer import write_tokenizer
from electra_fast.training.allocator import keep_freed_memory

OURS = "electra-fast"
SHAPES = {
    "BertForMaskedLM": {"model.embedding_size": "256", "model.intermediate_size": "1024"},
    "ModernBertForMaskedLM": {"model.embedding_size": "256"},
}
"""Where theirs differs from `mini`."""


class Chunks(torch.utils.data.Dataset[dict[str, Any]]):
    """[CLS] document [SEP] of all documents in a row, cut into rows of equal length: `group_texts` of `run_mlm.py`."""

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
    """A new model of one of their classes with a configuration's sizes, and else as the class is by default."""
    import transformers

    transformers.set_seed(config.train.seed)
    shape, cls = config.model, getattr(transformers, name)
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


def train(
    name: str, config: ef.Config, num_steps: int, corpus: str | Path, out: Path, callbacks: tuple[Any, ...] = ()
) -> None:
    """Trains for all of a configuration's steps or none, or resumes; leaves `out/model`, which `finetune` reads.

    Memory is allocated as in our own training, which makes theirs up to 1.6 times as fast (LOG.md).
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
        trainer = Trainer(model, arguments, collate, rows, callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=any((out / "checkpoints").glob("checkpoint-*")))
    save(model, tokenizer, out / "model")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model; of BERT, which is an ELECTRA whose embeddings are as wide as its layers, as that."""
    from transformers import BertForMaskedLM, ElectraConfig, ElectraForMaskedLM

    if isinstance(model, BertForMaskedLM):
        config = {**model.config.to_dict(), "embedding_size": model.config.hidden_size}
        electra = ElectraForMaskedLM(ElectraConfig(**{k: v for k, v in config.items() if k != "model_type"}))
        names = {
            "bert.": "electra.",
            "cls.predictions.transform.": "generator_predictions.",
            "cls.predictions.decoder.": "generator_lm_head.",
            "cls.predictions.bias": "generator_lm_head.bias",
        }
        state = {}
        for name, tensor in model.state_dict().items():
            old, new = next(each for each in names.items() if name.startswith(each[0]))
            state[new + name.removeprefix(old)] = tensor
        electra.load_state_dict(state)
        model = electra
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def our_speed(config: ef.Config, corpus: str, out: Path) -> float:
    """Tokens per second of a run, by the median of its log."""
    ef.pretrain(config, data=corpus, out=out)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return statistics.median(line["tokens_per_second"] for line in lines)


def their_speed(name: str, config: ef.Config, corpus: str, out: Path) -> float:
    """Tokens per second of a run, by the median of its steps."""
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            ends.append(time.perf_counter())

    train(name, config, config.train.steps, corpus, out, (Clock(),))
    return config.train.batch_size * config.data.sequence_length / statistics.median(np.diff(ends))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus")
    parser.add_argument("model", choices=(OURS, *SHAPES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    config = ef.Config.preset("mini").override(
        {
            "train.steps": str(options.steps),
            "train.precision": options.precision,
            "train.log_every": "5",
            "train.eval_every": "0",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.model == OURS:
            speed = our_speed(config, options.corpus, Path(folder))
        else:
            vocab_size = str(ef.Corpus(options.corpus).vocab_size)
            config = config.override({**SHAPES[options.model], "model.vocab_size": vocab_size})
            speed = their_speed(options.model, config, options.corpus, Path(folder))
    machine = f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"{machine}: {options.model} {options.precision} {speed:.0f} tokens/s")


if __name__ == "__main__":
    main()

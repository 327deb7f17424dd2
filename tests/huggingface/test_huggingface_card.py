"""Model cards: Hugging Face's front matter, and a description of the recorded training only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModel

from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.huggingface.export import export, import_
from electra_fast.training.pretrain import pretrain

TRAIN = {"steps": 3, "batch_size": 4, "log_every": 2, "checkpoint_every": 2, "eval_every": 0}
TEXTS = ["acme/webtext", "squad"]
BASE = {"base_model": "google/electra-base"}
REMARK = "Token type 1 never occurred in training."


def trained(folder: Path, corpus: Path, recipe: str, packing: str, **changes: object) -> Config:
    config = Config.preset("tiny", recipe).override(TRAIN | changes, packing=packing, sequence_length=32)
    pretrain(corpus, config=config, out=folder)
    return config


@pytest.mark.parametrize(("recipe", "packing"), [("google", "examples"), ("paper", "best-fit"), ("modern", "best-fit")])
def test_cards_describe_the_training(tmp_path: Path, tiny_corpus: Path, recipe: str, packing: str) -> None:
    config = trained(tmp_path / "run", tiny_corpus, recipe, packing)
    export(tmp_path / "run", out=tmp_path / "out")
    tokens = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["tokens"]
    detector = "token-classification" if recipe == "modern" else None
    pipelines = {"encoder": "feature-extraction", "discriminator": detector, "generator": "fill-mask"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == pipelines.keys()
    for role, pipeline in pipelines.items():
        card = ModelCard.load(tmp_path / "out" / role / "README.md")
        front = card.data.to_dict()
        assert front["library_name"] == "transformers"
        assert ("modernbert" if recipe == "modern" else "electra") in front["tags"]
        assert front.get("pipeline_tag") == pipeline
        length = config.data.sequence_length
        assert f"objective `electra`, 3 of 3 steps of 4 rows of {length} tokens" in card.text
        assert f"{tokens:,} tokens seen" in card.text
        assert f"content hash `{Corpus(tiny_corpus).content_hash}`" in card.text
        assert f"packing `{packing}`" in card.text and f"optimizer `{config.optimizer.name}`" in card.text
        assert (REMARK in card.text) == (recipe != "modern" and packing == "best-fit")
        assert str(tmp_path) not in card.content and "imported" not in card.text
        folder = tmp_path / "out" / role
        (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        encoder = AutoModel.from_pretrained(folder)
        whole = getattr(transformers, name).from_pretrained(folder)
        counts = f"{encoder.num_parameters():,} parameters"
        if role != "encoder":
            counts += f" in `AutoModel`, {whole.num_parameters():,} with the head"
        assert f"- {counts}\n" in card.text and f"Class in `transformers`: `{name}`." in card.text
        assert f"vocabulary of {encoder.config.vocab_size}" in card.text
        assert f"trained on rows of {length} tokens; positions from {length} on were not trained\n" in card.text
        assert "unigram_auc" not in card.text and not {"language", "license"} & front.keys()


@pytest.mark.parametrize(
    "requested",
    [{"language": ["no"], "license": "apache-2.0"}, {"language": ["hu", "zh-Hant"], "dataset": TEXTS, **BASE}],
)
def test_cards_contain_the_requested_metadata(tmp_path: Path, whole_run: Path, requested: dict[str, Any]) -> None:
    export(whole_run, out=tmp_path / "out", **requested)
    entries = {"datasets" if name == "dataset" else name: value for name, value in requested.items()}
    evaluation = json.loads((whole_run / "evaluations.jsonl").read_text().splitlines()[-1])
    for role in ("discriminator", "generator"):
        card = ModelCard.load(tmp_path / "out" / role / "README.md")
        front = yaml.safe_load(card.content.split("---")[1])
        automatic = {key: front[key] for key in ("library_name", "tags", "pipeline_tag") if key in front}
        assert front == entries | automatic
        assert card.data.library_name == "transformers"
        replacements = "with replacements sampled by token frequency, at step 24"
        line = f"AUC {evaluation['unigram_auc']:.3f} on the validation set, {replacements}"
        assert (line in card.text) == (role == "discriminator")


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"language": ["Hungarian"]}, "language = 'Hungarian': must be a code such as hu, en or zh-Hant"),
        ({"language": ["hu\nlicense: x"]}, "language = 'hu.nlicense: x': must be a code"),
        ({"license": "Apache 2.0"}, "license = 'Apache 2.0': must be an identifier such as apache-2.0"),
        ({"dataset": ["texts/de/part"]}, "'texts/de/part': must be a name on the Hugging Face Hub, such as owner/name"),
        ({"base_model": "./model"}, "'./model': must be a name on the Hugging Face Hub"),
    ],
)
def test_invalid_metadata_is_rejected(tmp_path: Path, whole_run: Path, requested: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export(whole_run, out=tmp_path / "out", **requested)
    assert not (tmp_path / "out").exists()


def test_unfinished_run_is_exported_only_on_request(tmp_path: Path, tiny_corpus: Path) -> None:
    trained(tmp_path / "run", tiny_corpus, "google", "examples")
    earlier = tmp_path / "run" / "checkpoints" / "step-2"
    with pytest.raises(ValueError, match=r"step-2: at step 2 of 3; finish it with .* or export it .* --unfinished"):
        export(earlier, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(earlier, out=tmp_path / "out", unfinished=True)
    text = (tmp_path / "out" / "discriminator" / "README.md").read_text(encoding="utf-8")
    assert "2 of 3 steps of 4 rows" in text and "- exported before its training was finished" in text
    export(tmp_path / "run" / "checkpoints" / "step-3", out=tmp_path / "out")
    assert "unfinished" not in (tmp_path / "out" / "discriminator" / "README.md").read_text(encoding="utf-8")
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace("steps = 3 ", "steps = 5 "), encoding="utf-8")
    export(tmp_path / "run", out=tmp_path / "out")  # the checkpoint is at the end of its schedule
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    settings.write_text(settings.read_text().replace("steps = 5 ", "steps = 2 "), encoding="utf-8")
    export(tmp_path / "run", out=tmp_path / "out")  # the run's steps were reduced to this step


def test_card_of_imported_model_states_no_training(tmp_path: Path, tiny_corpus: Path) -> None:
    trained(tmp_path / "run", tiny_corpus, "google", "best-fit", **{"objective.name": "mlm"})
    export(tmp_path / "run", out=tmp_path / "out")
    text = (tmp_path / "out" / "generator" / "README.md").read_text(encoding="utf-8")
    assert "# Masked language model" in text and "objective `mlm`" in text
    import_(tmp_path / "out", out=tmp_path / "again")
    export(tmp_path / "again", out=tmp_path / "more")
    text = (tmp_path / "more" / "generator" / "README.md").read_text(encoding="utf-8")
    assert "Exported from Hugging Face folders" in text and "steps of" not in text and REMARK in text
    pretrain(tiny_corpus, config=Config.load(tmp_path / "again" / "config.toml"), out=tmp_path / "again")
    export(tmp_path / "again", out=tmp_path / "more")
    text = (tmp_path / "more" / "generator" / "README.md").read_text(encoding="utf-8")
    assert "continued from an imported model" in text and "3 of 3 steps" in text and REMARK in text

"""The demo with fewer steps writes all outputs, and its model has learned something."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from in_process import run

from electra_fast.errors import Interrupted

pytestmark = [pytest.mark.slow, pytest.mark.process]

SHORT = """
import sys
import electra_fast.demonstration as module
from electra_fast.cli import main
config = module.demo_config().override(steps=500)
module.demo_config = lambda: config
sys.exit(main(["demo", "--out", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-c", SHORT, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "FORCE_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    return out, done


def test_writes_all_outputs(demo):
    out, done = demo
    assert {"vocab.txt", "shards", "run", "export", "demo.png"} <= {path.name for path in out.iterdir()}
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG") and (out / "demo.png").stat().st_size > 20_000
    assert len((out / "vocab.txt").read_text(encoding="utf-8").splitlines()) == 1024
    assert "\x1b[" in done.stdout and "really replaced" in done.stdout
    assert "\\n" not in done.stderr  # each line of a report is printed as a line


def plain(text):
    """Returns text without colors and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def test_discriminator_beats_majority_on_validation_set(demo):
    out, done = demo
    evaluated = run("evaluate", out / "run", out / "shards", "--json",
                    "--sequence-length", 32, "--mlm-examples", 100)  # fmt: skip
    metrics = json.loads(evaluated.stdout)
    assert metrics["discriminator_auc"] >= 0.70
    assert metrics["discriminator_accuracy"] > 1 - metrics["replaced_fraction"]
    # The generator has learned too: replacements near the unigram distribution would be easy to detect.
    assert metrics["generator_accuracy"] > 0.1
    # Appendix G: the discriminator's choice among the generator's candidates.
    assert metrics["mlm_recall_at_100"] > metrics["mlm_accuracy"] > 0.05 and metrics["mlm_examples"] == 100
    assert metrics["unigram_auc"] > 0.7 and f"AUC {metrics['unigram_auc']:.3f} with" in plain(done.stdout)


def test_export_has_equal_logits_in_transformers(demo):
    from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

    import electra_fast

    out, _ = demo
    model = electra_fast.load(out / "run").model
    tokenizer = AutoTokenizer.from_pretrained(out / "export" / "discriminator")
    batch = tokenizer(["Return a list of the names in a module.", "Raise an error."], padding=True, return_tensors="pt")
    inputs = (batch["input_ids"], batch["attention_mask"])
    discriminator = AutoModelForTokenClassification.from_pretrained(out / "export" / "discriminator").eval()
    generator = AutoModelForMaskedLM.from_pretrained(out / "export" / "generator").eval()
    with torch.no_grad():
        hf_logits = discriminator(*inputs).logits[..., 1]  # the logit of "replaced"; the logit of "original" is 0
        torch.testing.assert_close(model.discriminator_logits(*inputs), hf_logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.generator_logits(*inputs), generator(*inputs).logits, rtol=0, atol=1e-5)


def test_resumes_without_tokenizer_json(tmp_path, monkeypatch, capfd):
    import electra_fast.demonstration as module

    def interrupted(*_, **__):
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(module, "documentation", lambda: iter(["Some words of several documents. " * 40] * 30))
    monkeypatch.setattr(module, "pretrain", interrupted)
    with pytest.raises(Interrupted):
        module.demo(out=tmp_path)
    before = (tmp_path / "shards/manifest.json").read_bytes()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(Interrupted):
        module.demo(out=tmp_path)
    assert (tmp_path / "shards/manifest.json").read_bytes() == before
    stderr = capfd.readouterr().err
    assert "already complete" in stderr and "judging" not in stderr

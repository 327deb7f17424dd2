"""Files with absurd numbers, wrong types or broken values: refused in one line before anything is built from them."""

import json
import shutil
import subprocess
import sys

import in_process
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from electra_fast.checkpoint import read_tensors
from electra_fast.config.config import Config
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.files.json_files import read_object, write_object
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.export import import_

NAN = float("nan")
HUGE = 2**64


@pytest.mark.parametrize(
    "key, value",
    [
        *(("hidden_size", value) for value in (HUGE, -1)),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**9),
        *(("intermediate_size", value) for value in (1.5, "64", True, None)),
        *(("layer_norm_eps", value) for value in (NAN, "x")),
        ("model_type", []),
        *(("architectures", value) for value in (NAN, "ElectraModel", [[]])),
        *(("electra_fast", value) for value in ([], {"model": []}, {"train": {"steps": 10**400}})),
    ],
)
def test_absurd_model_settings_are_one_line(encoder_folder, tmp_path, key, value):
    folder = shutil.copytree(encoder_folder, tmp_path / "model")
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {key: value}))
    outcome = in_process.run("import", folder, "--out", tmp_path / "run")
    assert outcome.returncode == 2 and len(outcome.stderr.splitlines()) == 1
    assert f"{folder}/config.json: " in outcome.stderr and key.split("_")[-1] in outcome.stderr


def test_wrong_sizes_take_no_memory(encoder_folder, tmp_path):
    """The error comes from the header of the file, before a model of this size is built."""
    folder = shutil.copytree(encoder_folder, tmp_path / "model")
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"hidden_size": 2**16, "intermediate_size": 2**17}))
    with pytest.raises(InputError, match=r"model.safetensors: tensor .*: expected shape"):
        import_(folder, out=tmp_path / "run")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[train]\nsteps = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("[train]\nsteps = " + "[" * 200 + "]" * 200, "nested more than 100 levels deep"),
        ("[" + ".".join("a" * 5000) + "]", "nested too deeply"),
        ("[train]\nsteps = 0x" + "f" * 5000, "an integer of thousands of digits"),
        ("[train]\nsteps = " + "9" * 50, r"at least 1 and at most 9223372036854775807"),
        ("[optimizer]\nlearning_rate = " + "9" * 400, "must be a number"),
        ("[model]\nnum_layers = 1000\nhidden_size = 65536", "must give at most 100 billion parameters, not "),
        ("[data]\ncorpus = {a = " + "9" * 400 + "}", "a table of numbers"),
    ],
)
def test_absurd_configuration_is_one_line(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text + "\n")
    with pytest.raises(InputError, match=f"run.toml: .*{message}"):
        Config.load(tmp_path / "run.toml")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 150 + "1" + "}" * 150, '{"a": ' + "9" * 5000 + "}"])
def test_absurd_json_file_is_one_line(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(InputError, match=r"state.json: not a JSON object: (nested|an integer of thousands)"):
        read_object(tmp_path / "state.json")


@pytest.mark.parametrize("value", [NAN, 1e300])
def test_non_numeric_values_are_refused(encoder_folder, tmp_path, value):
    folder = shutil.copytree(encoder_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight"
    tensors[name] = tensors[name].double()
    tensors[name][0, 0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for read in (load_encoder, lambda source: import_(source, out=tmp_path / "run")):
        with pytest.raises(InputError, match=f"model.safetensors: {name} has NaN or infinite values"):
            read(folder)
    save_file({"exp_avg": torch.tensor([1.0, value])}, tmp_path / "optimizer.safetensors")
    with pytest.raises(InputError, match="optimizer.safetensors: exp_avg has NaN or infinite values"):
        read_tensors(tmp_path / "optimizer.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": True}, "step = 'True': must have the type int"),
        ({"log_window": []}, "log_window: not an object"),
        ({"history": {"totals": {"loss": []}}}, "history: totals = "),
        ({"loader": 1}, "loader = '1': must have"),
    ],
)
def test_state_with_wrong_types_is_refused(tmp_path, change, message):
    """Even if its checksum is right."""
    checkpoint_folder.seal(tmp_path, TrainState())
    assert checkpoint_folder.read_state(tmp_path) == TrainState()
    content = read_object(tmp_path / "state.json") | change
    del content["checksum"]
    write_object(tmp_path / "state.json", checkpoint_folder.sealed(content, tmp_path, []))
    with pytest.raises(InputError, match=message):
        checkpoint_folder.read_state(tmp_path)


# The memory of a whole machine, in a process with a small limit.
TOO_LARGE = """
import resource, sys, torch
from electra_fast.cli import main
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 29),) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
def test_sizes_beyond_memory_are_one_line(tiny_corpus, tmp_path):
    command = [sys.executable, "-c", TOO_LARGE, "pretrain", tiny_corpus, "--preset", "tiny"]
    command += ["--out", tmp_path / "run", "--model.hidden_size", "8192"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    *_, last = finished.stderr.splitlines()
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert last.startswith("electra-fast: error: out of memory: ") and "raise train.accumulate" in last


@pytest.mark.parametrize(
    "error", [MemoryError(), pa.ArrowMemoryError("malloc of size 9"), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_out_of_memory_in_any_library_is_one_line(monkeypatch, error):
    def fail(corpus):
        raise error

    monkeypatch.setattr("electra_fast.verify", fail)
    outcome = in_process.run("verify", "corpus")
    assert outcome.returncode == 2 and outcome.stderr.startswith("electra-fast: error: out of memory")

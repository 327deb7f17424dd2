"""The command line: streams, exit codes, one-line errors. Commands run in process, except for tests of a shell."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from in_process import run

import electra_fast as ef
from electra_fast.cli import main
from electra_fast.cli.parser import build_parser
from electra_fast.config.config import Config
from electra_fast.config.presets import RECIPES
from electra_fast.data.prepare import prepare
from electra_fast.hardware.flops import flops_per_token
from electra_fast.messages import UNSAFE, printable
from electra_fast.objectives import OBJECTIVES


def shell(*arguments):
    words = [sys.executable, "-m", "electra_fast", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def fails(*arguments, how=run):
    """Returns the one line of a failing command's error."""
    done = how(*arguments)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stdout == "" and "Traceback" not in done.stderr
    said = done.stderr.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("electra-fast: error: "), done.stderr
    return said[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text → vocabulary → corpus → run → export, with commands only."""
    folder = tmp_path_factory.mktemp("cli")
    text = "\n\n".join(f"The {n}th document speaks of {n * 7} things, and of {n % 5} others." for n in range(400))
    (folder / "text.txt").write_text(text)
    steps = [
        ("vocab", folder / "text.txt", "--out", folder / "vocab.txt", "--size", 200),
        ("prepare", folder / "text.txt", "--vocab", folder / "vocab.txt", "--out", folder / "shards", "--holdout", 0.1),
        ("pretrain", folder / "shards", "--preset", "tiny", "--out", folder / "run", "--train.steps", 3,
         "--train.log_every=1", "--train.batch_size", 4, "--data.sequence_length", 32),
        ("export", folder / "run", "--out", folder / "export"),
        ("import", folder / "export", "--out", folder / "imported"),
    ]  # fmt: skip
    for step in steps:
        done = run(*step)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) <= 3  # only the result
    return folder


def test_commands_from_text_to_export(folder):
    assert (folder / "shards/manifest.json").exists() and (folder / "shards/holdout/manifest.json").exists()
    assert (folder / "run/config.toml").exists() and (folder / "run/checkpoints/step-3").is_dir()
    for name in ("discriminator", "generator"):
        files = {path.name: path.stat().st_mode for path in (folder / "export" / name).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys() and len({*files.values()}) == 1


NAMES = "日本 é 😀 \x85"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252", "utf-16"])
def test_output_in_any_terminal_encoding(whole_run, tmp_path, monkeypatch, encoding):
    """JSON is UTF-8 or ASCII; other text has Python's escapes for characters outside the encoding."""
    (tmp_path / "names.txt").write_text(f"{NAMES}\nnext\n", encoding="utf-8")
    words = [str(argument) for argument in ("detect", whole_run, tmp_path / "names.txt")]
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    assert main([*words, "--threshold", "0"]) == 0
    answers = streams[0].buffer.getvalue().decode("utf-16" if encoding == "utf-16" else "utf-8")
    first, _ = map(json.loads, answers.splitlines())
    names = [word["text"] for word in first["words"]]
    assert names == ["日", "本", "é", "😀"]
    ef.vocab(iter([NAMES] * 3), out=tmp_path / "v/vocab.txt", size=60, cased=True, progress=False)
    prepare(iter([NAMES] * 3), vocab=tmp_path / "v/vocab.txt", out=tmp_path / NAMES, progress=False)
    monkeypatch.setattr(sys, "stdout", streams[1])
    assert main(["inspect", str(tmp_path / NAMES)]) == 0
    streams[1].flush()
    shown = streams[1].buffer.getvalue().decode(encoding)
    assert " ".join(names).encode(encoding, "backslashreplace").decode(encoding) in shown


def test_evaluate_json_of_run_and_export(folder):
    common = (folder / "shards", "--sequence-length", 32, "--batch-size", 8, "--json")
    ours, theirs = (json.loads(run("evaluate", folder / source, *common).stdout) for source in ("run", "export"))
    assert list(ours)[:4] == ["unigram_auc", "discriminator_auc", "discriminator_loss", "generator_loss"]
    assert 0 < ours["unigram_auc"] < 1 and ours["unigram_auc"] != ours["discriminator_auc"]
    assert "generator_accuracy" in ours and "mlm_accuracy" not in ours
    assert ours["rows"] == theirs["rows"]
    assert ours["generator_loss"] == pytest.approx(theirs["generator_loss"], abs=1e-4)


def test_evaluate_prints_comparable_metrics_first(folder):
    done = run("evaluate", folder / "run", folder / "shards")
    compares, auc, does_not, first_metric, *_ = done.stdout.splitlines()
    assert compares.startswith("Comparable between models") and auc.split()[0] == "unigram_auc"
    assert does_not.startswith("Not comparable") and first_metric.split()[0] == "discriminator_auc"
    assert "was trained on rows of 32 tokens and is evaluated on rows of 128" in done.stderr
    fixed = json.loads(run("evaluate", folder / "run", folder / "shards", "--corrupted-by", "unigram", "--json").stdout)
    assert fixed["unigram_auc"] == fixed["discriminator_auc"] == pytest.approx(float(auc.split()[1]), abs=0.05)


def test_inspect_and_verify(folder):
    figures = json.loads(run("inspect", folder / "shards", "--json").stdout)
    assert figures["documents"] + figures["held_out_documents"] == 400
    assert figures["rows"] == figures["best_fit_rows"] and figures["best_fit_tokens_dropped"] == 0
    assert figures["examples_tokens_kept"] + figures["examples_tokens_dropped"] == figures["tokens"]
    assert 0 < figures["examples_fill"] < figures["best_fit_fill"] <= 1 and figures["examples_rows"] > 0
    shown = run("inspect", folder / "shards", "--sequence-length", 32, "--masking", "span", "--packing", "examples")
    assert shown.returncode == 0 and shown.stderr == "" and "[CLS]" in shown.stdout and "[MASK](" in shown.stdout
    of_recipe = ("--masking", Config().data.masking, "--mask-prob", Config().data.mask_prob)
    rows = [run("inspect", folder / "shards", *options).stdout for options in ((), of_recipe, ("--mask-prob", 0.15))]
    assert rows[0] == rows[1] and rows[0].count("[MASK](") > rows[2].count("[MASK](") > 0
    assert max(map(len, rows[0].splitlines())) > 80  # a pipe has no width
    short = ("inspect", folder / "shards", "--sequence-length", 16, "--cut-at")
    assert run(*short, "token").stdout != run(*short, "line").stdout
    checked = run("verify", folder / "shards")
    assert checked.returncode == 0 and "content_hash" in checked.stdout and checked.stderr == ""
    assert json.loads(run("verify", folder / "shards", "--json").stdout) == ef.verify(folder / "shards")
    assert figures == ef.inspect(folder / "shards") and f"{ef.inspect(folder / 'shards')}\n" == rows[0]


def test_json_of_vocab_and_prepare(folder, tmp_path):
    text = folder / "text.txt"
    words = tmp_path / "vocab.txt"
    out = tmp_path / "out"
    made = json.loads(run("vocab", text, "--out", words, "--size", 100, "--json").stdout)
    of_trimming = dict.fromkeys(("trimmed_from", "unknown_share", "split_share"))
    assert made == {"out": str(words), "num_entries": 100, "skipped_files": 0, "skipped_rows": 0} | of_trimming
    report = json.loads(run("prepare", text, "--vocab", words, "--out", out, "--json").stdout)
    assert report["packings"]["best-fit"]["128"]["tokens"] == report["num_tokens"] == ef.Corpus(out).num_tokens
    assert (report["out"], report["complete"], report["repeats"]["documents"]["total"]) == (str(out), True, 400)


ODD = "odd\n\x1b[2J\u202e"
# Commands that print lines, and their minimum number; `finetune` is in test_messages, `predict` prints
# as `detect` does, `demo` and `reproduce` are slow.
LINES = {
    "vocab": (("vocab", "text.txt", "--out", "entries/vocab.txt", "--size", 150), 2),
    "prepare": (("prepare", "text.txt", "--vocab", "vocab.txt", "--out", "again"), 3),
    "inspect": (("inspect", "shards"), 20),
    "verify": (("verify", "shards"), 3),
    "pretrain": (("pretrain", "shards", "--dry-run", "--preset", "tiny", "--train.batch_size", 4), 100),
    "adapt": (("adapt", "run", "text.txt", "--out", "domain", "--train.steps", 1, "--train.batch_size", 4), 8),
    "evaluate": (("evaluate", "run", "shards", "--max-batches", 1), 10),
    "detect": (("detect", "run", "text.txt", "--text", "text"), 400),
    "export": (("export", "run", "--out", "other"), 1),
    "import": (("import", "model/encoder", "--generator", "small", "--out", "adapted"), 3),
    "flops": (("flops", "--config", "run/config.toml"), 10),
    "plan": (("plan", "shards", "--config", "run/config.toml", "--tokens-per-second", "1k"), 8),
    "doctor": (("doctor", "--config", "run/config.toml"), 8),
    "report": (("report", "run", "--out", "report.html"), 1),
}


@pytest.fixture(scope="module")
def odd(folder):
    """Runs the commands in a folder whose name has control characters."""
    odd = shutil.copytree(folder, folder.parent / ODD)
    (odd / "export").rename(odd / "model")
    (odd / "entries").mkdir()
    return odd


@pytest.mark.process
@pytest.mark.parametrize(
    "command", [*sorted(LINES.keys() - {"doctor"}), pytest.param("doctor", marks=pytest.mark.slow)]
)
def test_line_breaks_in_values_are_escaped(command, odd):
    assert {*LINES, "finetune", "predict", "demo", "reproduce"} == build_parser().commands.keys()
    words, num_lines = LINES[command]
    names = {path.name for path in odd.iterdir()} | {"again", "other", "adapted", "domain", "report.html"}
    done = run(*(odd / word if str(word).partition("/")[0] in names else word for word in words))
    assert done.returncode in (0, command == "doctor"), done.stderr
    said = done.stdout + done.stderr
    assert said.count("\n") >= num_lines and {"\n"} >= set(UNSAFE.findall(said))
    for escaped in (printable(ODD), json.dumps(ODD)[1:-1]):  # as text and in TOML
        said = said.replace(escaped, "")
    assert "\\n" not in said and "odd" not in said


def test_verify_reports_damaged_file(folder, tmp_path):
    shards = shutil.copytree(folder / "shards", tmp_path / "shards")
    tokens = next(shards.glob("*.tokens"))
    damaged = bytearray(tokens.read_bytes())
    damaged[70] ^= 1
    tokens.write_bytes(damaged)
    said = fails("verify", shards)
    assert tokens.name in said and "block 0" in said


def test_run_resumes_with_saved_configuration_and_import_accepts_flags(folder):
    done = run("pretrain", "--out", folder / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"run": str(folder / "run"), "step": 3, "is_finished": True}
    assert "step 3 of 3: finished" in done.stderr
    refused = fails("pretrain", "--out", folder / "run", "--train.batch_size", 8)
    assert "train.batch_size = 8, but this run was started with 4" in refused and "--allow-changes" in refused
    imported = ("pretrain", folder / "shards", "--out", folder / "imported")
    done = run(*imported, "--train.steps", 2, "--train.batch_size", 4)
    assert done.returncode == 0, done.stderr
    assert (folder / "imported/checkpoints/step-2").is_dir()


def test_run_resumes_from_any_folder(folder, tmp_path, monkeypatch):
    data = ("shards", "--preset", "tiny", "--steps", 1, "--batch-size", 4, "--lr", "2e-3")
    monkeypatch.chdir(folder)
    started = run("pretrain", *data, "--out", tmp_path / "run")
    assert "Muon's matrices use optimizer.muon_learning_rate = 0.02" in started.stderr
    assert "\nlearning_rate = 0.002\n" in re.sub(" *#.*", "", (tmp_path / "run/config.toml").read_text())
    assert started.returncode == 0, started.stderr
    assert "starts; 1 steps, " in started.stderr
    monkeypatch.chdir(tmp_path)
    resumed = run("pretrain", "--out", "run")
    assert resumed.returncode == 0 and "Muon" not in resumed.stderr, resumed.stderr
    assert "resumes at step 1 of 1, " in resumed.stderr
    saved = tmp_path / "run/config.toml"
    saved.write_text(saved.read_text().replace(str(folder / "shards"), "moved"))
    said = fails("pretrain", "--out", tmp_path / "run")
    assert f'{saved}: data.corpus = "moved": no such folder; pass its new location: electra-fast pretrain' in said
    assert run("pretrain", folder / "shards", "--out", tmp_path / "run").returncode == 0


def test_missing_configuration_of_run(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    saved = tmp_path / "run/config.toml"
    saved.unlink()
    for options in ((), (folder / "shards", "--preset", "tiny")):
        said = fails("pretrain", *options, "--out", tmp_path / "run")
        assert f"{saved}: missing; restore it from {tmp_path / 'run/checkpoints/step-3'}" in said
    done = run("export", tmp_path / "run", "--out", tmp_path / "export")  # the checkpoint has a copy
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_flops_of_every_objective_match_pretrain(recipe):
    for name in OBJECTIVES:
        preset = "tiny" if name == "mlm" else "base"
        options = ("--preset", preset, "--recipe", recipe, "--objective.name", name)
        done = run("flops", *options, "--json")
        config = Config.preset(preset, recipe, name)
        assert json.loads(done.stdout)["per_token"]["total"] == flops_per_token(config).total
        changed = Config.preset(preset, recipe).differences(config).keys() - {"objective.name"}
        assert all(f"{key} = " in done.stderr for key in changed) and (done.stderr == "") == (not changed)
        assert "an output folder is missing" in fails("pretrain", "--recipe", recipe, "--objective.name", name)
    published = json.loads(run("flops", "--preset", "small", "--recipe", "google", "--json").stdout)
    assert 1.293743798272e18 in published.values()


@pytest.mark.parametrize(
    ("arguments", "counted_with"),
    [
        (("two-stage", "--generator.fraction", 0.5), 'model.tying = "none", generator.fraction = 1.0'),
        (("electra15", "--objective.disc_positions", "random", "--recipe", "google"), 'data.masking = "tokens"'),
        (("adversarial", "--objective.temperature", 2), "objective.temperature = 1.0"),
    ],
)
def test_flops_lists_keys_changed_by_objective(arguments, counted_with):
    done = run("flops", "--objective.name", *arguments)
    assert done.returncode == 0 and done.stderr == f"{arguments[0]}: counted with {counted_with}\n"
    assert "objective.name = 'mml': must be one of" in fails("flops", "--objective.name", "mml", *arguments[1:])


def test_help():
    text = run("pretrain", "--help-all").stdout
    assert "--optimizer.muon_learning_rate" in text and "--preset" in text
    alone = run()
    assert alone.returncode == 0 and alone.stdout == run("--help").stdout and "pretrain" in alone.stdout


@pytest.mark.parametrize("command", build_parser().commands)
def test_help_states_the_default_of_every_option(command):
    entries = run(command, "--help-all").stdout.split("\n  -")
    for action in build_parser().commands[command]._actions:
        if action.option_strings and not action.required and action.nargs != 0:
            name = re.compile(rf"{action.option_strings[0][1:]}[, ]")
            (entry,) = (entry_ for entry_ in entries if name.match(entry_))
            assert re.search(r"\(default:\s+[^\s)]", entry), entry


def test_quiet_keeps_results_warnings_and_errors(folder, tmp_path, monkeypatch):
    start = (folder / "shards", "--preset", "tiny", "--train.batch_size", 4, "--train.log_every", 1)
    for words, out in ((("-q", "pretrain"), "first"), (("pretrain", "--quiet"), "second")):
        done = run(*words, *start, "--train.steps", 3, "--optimizer.warmup_steps", 100, "--out", tmp_path / out)
        said = done.stderr.splitlines()
        assert done.returncode == 0 and said[0].startswith("warning: optimizer.warmup_steps = 100")
        assert all(line.startswith("warning: ") for line in said) and "the model has learned" in done.stderr
    assert "no such" in fails("--quiet", "flops", "--config", tmp_path / "none.toml")
    loud = ("flops", "--objective.name", "two-stage")
    assert run("-q", *loud).stderr == "" != run(*loud).stderr  # the environment is as before
    assert run("-q", *loud).stdout == run(*loud).stdout != ""


@pytest.mark.process
@pytest.mark.parametrize(("shell_name", "checked"), [("bash", True), ("zsh", False), ("tcsh", False)])
def test_completion_knows_commands_options_and_keys(shell_name, checked, tmp_path):
    pytest.importorskip("shtab")
    script = run("--print-completion", shell_name).stdout
    assert "finetune" in script and "optimizer.muon_learning_rate" in script
    for option, values in (
        (("--train.sharding", "none full"), ("--recipe", "paper google modern deberta")) if checked else ()
    ):
        words = f"electra-fast pretrain {option} ''"
        program = f'{script}\nCOMP_WORDS=({words})\nCOMP_CWORD=3\n_shtab_electra_fast\necho "${{COMPREPLY[*]}}"'
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
        assert done.stdout == f"{values}\n", done.stderr


def test_internal_error_keeps_traceback(folder, monkeypatch):
    def verify(corpus):
        raise ValueError("axis 3 is out of bounds")  # of a library

    monkeypatch.setattr("electra_fast.data.corpus.verify", verify)
    with pytest.raises(ValueError, match="axis 3") as caught:
        run("verify", folder / "shards")
    assert "this is a bug; please report it" in caught.value.__notes__[0]


def test_metrics_of_the_training_text_are_labeled(folder, tmp_path):
    """For a corpus without a validation set, but not for a corpus outside the run."""
    command = ("evaluate", folder / "run", folder / "shards" / "holdout", "--sequence-length", 32, "--json")
    assert run(*command).stderr == ""
    data = ("--vocab", folder / "vocab.txt", "--out", tmp_path / "shards")
    assert run("prepare", folder / "text.txt", *data).returncode == 0
    size = ("--train.steps", 2, "--train.batch_size", 4)
    done = run("pretrain", tmp_path / "shards", "--preset", "tiny", "--out", tmp_path / "run", *size)
    assert done.returncode == 0, done.stderr
    done = run("evaluate", tmp_path / "run", tmp_path / "shards", "--json")
    assert json.loads(done.stdout)["tokens"] > 0
    assert f"warning: {tmp_path / 'shards'}: the model was trained on all of this corpus" in done.stderr


def test_run_is_evaluated_on_its_corpus_by_default(folder, tmp_path):
    shards = shutil.copytree(folder / "shards", tmp_path / "shards")
    size = ("--train.steps", 2, "--train.batch_size", 4)
    assert run("pretrain", shards, "--preset", "tiny", "--out", tmp_path / "run", *size).returncode == 0
    for source in ("run", "run/checkpoints/step-2"):
        default, named = (run("evaluate", tmp_path / source, *data, "--json") for data in ((), (shards,)))
        assert default.stdout == named.stdout != "" and named.stderr == ""
        where = f"evaluated on its training corpus, {shards} (validation set)"
        assert default.stderr == f"{tmp_path / source}: {where}\n"
    assert "has no record of its training corpus; pass the corpus" in fails("evaluate", folder / "export")
    shutil.rmtree(shards)
    assert f"run: was trained on {shards}, which no longer exists; pass" in fails("evaluate", tmp_path / "run")
    shutil.copytree(folder / "shards/holdout", shards)
    assert f"run: {shards} has changed since" in fails("evaluate", tmp_path / "run")


DATA = "pretrain {folder}/shards --preset tiny --out {folder}/none"
MISTAKES = {
    f"{DATA} --train.stepz 3": "did you mean --steps?",
    f"{DATA} --train.steps many": "must be an integer",
    f"{DATA} --train.steps 0": "must be at least 1",
    f"{DATA} --train.steps": "--train.steps needs a value",
    f"{DATA} --fast": "electra-fast pretrain has no option --fast; see `electra-fast pretrain --help-all`",
    f"{DATA} --max-steps=5": "has no option --max-steps; did you mean --steps?",
    f"{DATA} --dry-run true": "--dry-run takes no value",
    f"{DATA} --num-layers 4": "did you mean --model.num_layers or --generator.num_layers?",
    f"{DATA} --optimizer.lr 1e-3": "did you mean --lr?",
    f"{DATA} --model.num_heads 5": "must divide",
    "finetune --seeds 1.5": "argument --seeds: '1.5': must be an integer",
    "vocab x.txt --sample 4h": "'4h': must be a number of bytes, such as 200GB",
    "vocab x.txt --sample 1.5GB --size 1e3": "x.txt: not found",
    "pretrain --preset smal": "did you mean small?",
    "flops run/config.toml": "run/config.toml; pass a configuration with --config",
    "pretrain --config {tmp}/none.toml": "no such configuration",
    "pretrain --preset tiny --out {tmp}/run": "a corpus or an output folder is missing",
    "pretrain {tmp} --preset tiny --out {tmp}/run": "manifest.json",
    "evaluate {tmp}/nothing {folder}/shards": "{tmp}/nothing",
    "prepare {tmp}/*.txt --vocab {folder}/vocab.txt --out {tmp}/s": "No file",
    "prepare x.txt --out y": "required: --vocab",
    "pretrain --config {tmp}/c.toml": "c.toml: train.steps = 'ten': must be an integer",
    "qqq": "qqq: no such command; see --help",
    "--train.steps 3": "--train.steps: name the command first: electra-fast COMMAND --train.steps",
    "-q": "required: COMMAND",
    **{f"pretrain --config {{tmp}}/run.{end}": "must be TOML" for end in ("yaml", "YML", "json", "cfg")},
}


@pytest.mark.parametrize("words", MISTAKES)
def test_input_error_is_one_line(words, folder, tmp_path):
    (tmp_path / "c.toml").write_text("[train]\nsteps = 'ten'\n")
    for end in ("yaml", "YML", "json", "cfg"):
        (tmp_path / f"run.{end}").write_text("# steps: 10\n" if "m" in end.lower() else '{"train": {"steps": 10}}')
    said = fails(*words.format(folder=folder, tmp=tmp_path).split())
    assert MISTAKES[words].format(tmp=tmp_path) in said
    assert not (folder / "none").exists()


@pytest.mark.process
def test_command_in_a_process(folder):
    said = fails("pretrian", "--preset", "tiny", how=shell)
    assert "pretrian: no such command; did you mean pretrain?" in said
    assert shell("-V").stdout.startswith("electra-fast 0.")
    assert json.loads(shell("verify", folder / "shards", "--json").stdout)
    closed = f"{sys.executable} -m electra_fast verify {folder / 'shards'} --json | true"
    done = subprocess.run(closed, shell=True, capture_output=True)
    assert done.stderr == b""  # no error


@pytest.mark.parametrize("words", [["--labels", "-1,0,1"], ["--labels=-1,0,1"], ["--labels", "-1,0,1", "--seeds", "2"]])
def test_values_may_begin_with_a_minus(words):
    start = ["finetune", "m", "--task", "sst2", "--out", "o"]
    options = build_parser().parse([*start, *words])
    assert options.labels == ("-1", "0", "1")
    options = build_parser().parse([*start, "--label-map", "-=x"])
    assert options.label_map == ("-=x",)

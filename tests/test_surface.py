"""The rules of the command line and of its Python functions (docs/reference/surface.md), for all commands."""

import inspect
import re

import pytest
from in_process import run

import electra_fast as ef
from electra_fast.cli.arguments import MAX_SHOWN, KeyOption
from electra_fast.cli.parser import CONFIGURED, build_parser
from electra_fast.config.spellings import ANSWERS
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuningConfig

PARSER = build_parser()
# Common options of transformers' run_mlm, run_glue, run_ner and run_qa, of nanochat and of torchtitan, keyed by the
# command to which a user may pass them.
OTHER_TOOLS = {
    "pretrain": "cache_dir torch_dtype mlm_probability eval_strategy per_device_train_batch_size learning_rate "
    "per_device_eval_batch_size gradient_accumulation_steps weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "max_grad_norm num_train_epochs max_steps lr_scheduler_type warmup_ratio warmup_steps logging_dir save_strategy "
    "save_steps save_total_limit bf16 fp16 tf32 eval_steps run_name report_to gradient_checkpointing torch_compile "
    "depth num_iterations device_batch_size total_batch_size embedding_lr unembedding_lr matrix_lr eval_every "
    "save_every job.config_file job.dump_folder model.hf_assets_path training.steps training.seq_len "
    "training.local_batch_size training.global_batch_size training.max_norm training.dataset training.dataset_path "
    "training.mixed_precision_param optimizer.lr optimizer.eps lr_scheduler.warmup_steps lr_scheduler.decay_ratio "
    "checkpoint.folder checkpoint.initial_load_path metrics.log_freq metrics.enable_wandb training.compile "
    "parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree comm.init_timeout_seconds",
    "finetune": "per_device_train_batch_size fp16 learning_rate num_train_epochs max_steps warmup_ratio warmup_steps "
    "weight_decay eval_strategy save_strategy early_stopping_patience report_to num_epochs doc_stride n_best_size "
    "max_answer_length train_batch_size gradient_accumulation_steps model_name_or_path train_file validation_file "
    "test_file text_column_name label_column_name max_seq_length output_dir overwrite_output_dir do_train do_eval "
    "dataset_name tokenizer_name task_name max_train_samples resume_from_checkpoint push_to_hub",
    "vocab": "fname vocab_size input_sentence_size model_prefix",
}
# Commands that have each shared option: all for which it is meaningful, under the same name.
WORDS = {
    "data": "export",
    **dict.fromkeys(("model", "input", "corpus", "text-field", "skip-bad-records", "workers", "batches"), ""),
    "out": "demo vocab prepare pretrain adapt export import finetune predict detect evaluate report reproduce",
    "json": "demo vocab prepare inspect verify plan pretrain adapt export import finetune evaluate report doctor flops "
    "reproduce",
    "device": "demo plan pretrain adapt finetune predict detect evaluate doctor reproduce",
    "precision": "plan pretrain adapt doctor flops finetune predict detect evaluate",
    "text": "vocab prepare adapt finetune predict detect evaluate",
    "skip-bad-rows": "vocab prepare adapt finetune predict detect evaluate",
    "threads": "vocab prepare adapt",
    "seed": "vocab inspect plan pretrain adapt doctor flops",
    "seeds": "adapt finetune reproduce",
    "config": "plan pretrain doctor flops",
}
ANSWERED = {
    "pretrain --data": "the corpus needs no flag: electra-fast pretrain CORPUS",
    "pretrain --from": "did you mean --from-step?",
    "vocab --skip-bad-records": "did you mean --skip-bad-rows?",
    "prepare --text-field": "did you mean --text?",
    "plan --data": "the corpus needs no flag: electra-fast plan CORPUS",
    "evaluate --data": "the data needs no flag: electra-fast evaluate MODEL DATA",
    "evaluate --batches": "did you mean --max-batches?",
    "finetune --data": "did you mean --glue or --squad or --train?",
    "finetune --model": "the model needs no flag: electra-fast finetune MODEL",
    "predict --task": "electra-fast detect MODEL FILE",
    "reproduce --data": "the corpus needs no flag: electra-fast reproduce EXPERIMENT CORPUS",
    "reproduce --tasks": "did you mean --glue?",
    "pretrain --model_name_or_path": "electra-fast import MODEL --out RUN",
    "pretrain --model.name": "did you mean --preset?",
    "pretrain --lr_scheduler.warmup-steps": "did you mean --optimizer.warmup_steps?",
    "evaluate --seeds": "it is an option of adapt, finetune, reproduce",
    "predict --model": "the model needs no flag: electra-fast predict MODEL FILE",
}


def flags_of(command):
    return {flag for option in options(command) for flag in option.option_strings}


def options(command):
    return [action for action in PARSER.commands[command]._actions if action.option_strings]


def answer(command, flag):
    with pytest.raises(InputError) as error:
        PARSER.parse([command, flag, "x"])
    return str(error.value)


def points_somewhere(command, said):
    """Returns whether an answer suggests options of the command, or a command with its arguments."""
    if meant := re.search(r"did you mean (.*)\?", said):
        return flags_of(command).issuperset(meant[1].split(" or "))
    called = re.search(r"electra-fast (\w+) [A-Z]", said.partition(";")[2])
    return bool(called) and called[1] in PARSER.commands


@pytest.mark.parametrize("command", PARSER.commands)
def test_help_shows_at_most_ten_options_and_counts_the_others(command, monkeypatch):
    for width in (80, 130):
        monkeypatch.setenv("COLUMNS", str(width))
        texts = [run(command, flag).stdout for flag in ("--help", "--help-all")]
        assert max(len(line) for text in texts for line in text.splitlines()) < width
    listed = [re.findall(r"^  ((?:-\w, )?--[\w.-]+)", text, re.MULTILINE) for text in texts]
    shown = PARSER.commands[command].shown
    assert len(listed[1]) == len(options(command))
    if shown:
        assert listed[0] == shown and len(shown) <= MAX_SHOWN
        options_left, keys_left = re.findall(r"(\d+) more options(?: and (\d+) configuration keys)?: ", texts[0])[0]
        keys = [option for option in options(command) if isinstance(option, KeyOption)]
        assert int(keys_left or 0) == len(keys) - sum(option.option_strings[0] in shown for option in keys)
        assert int(options_left) + int(keys_left or 0) + len(shown) == len(options(command))
    else:
        assert texts[0] == texts[1] and len(listed[0]) <= MAX_SHOWN + len(("help", "help-all", "quiet"))


def test_options_of_other_tools_get_suggestions():
    """Suggestions never name an option that the command does not have."""
    answered = set()
    for command in PARSER.commands:
        typed = {*OTHER_TOOLS.get(command, "").split()}
        for name in typed | ANSWERS.keys() - {flag[2:].replace("-", "_") for flag in flags_of(command)}:
            said = answer(command, f"--{name}")
            is_answer = "--help-all" not in said
            assert is_answer or name not in typed, said
            assert "did you mean" not in said or points_somewhere(command, said), said
            answered |= {name} if is_answer else set()
    assert answered >= ANSWERS.keys()


@pytest.mark.parametrize("words", ANSWERED)
def test_suggestion_has_right_spelling(words):
    assert ANSWERED[words] in answer(*words.split())


@pytest.mark.parametrize("command", PARSER.commands)
def test_flags_accept_hyphens_and_underscores_but_no_abbreviation(command):
    sub = PARSER.commands[command]
    plain = {flag.replace("-", "_") for flag in flags_of(command)}
    for flag in flags_of(command):
        value = (
            "" if next(option for option in options(command) if flag in option.option_strings).nargs == 0 else "=true"
        )
        for other in (flag.replace("-", "_").replace("__", "--", 1), f"--{flag[2:].replace('_', '-')}"):
            if len(flag) > len("-q"):
                assert sub.arrange([other + value]) == [flag + value]
        if flag[:-1].replace("-", "_") not in plain and len(flag) > len("-q"):
            with pytest.raises(InputError, match="has no option"):
                sub.arrange([flag[:-1]])
        assert re.fullmatch(r"-\w|--[a-z0-9-]+|--[a-z]+\.[a-z0-9_]+", flag)


def overrides(*words):
    return PARSER.parse(["finetune", *words, "m", "--out", "o"]).overrides


def test_boolean_keys_need_no_value():
    assert overrides("--finetune.calibrate", "--finetune.both-orders", "false") == {
        "finetune.calibrate": "true",
        "finetune.both_orders": "false",
    }
    assert overrides("--finetune.calibrate=False") == {"finetune.calibrate": "False"}
    assert PARSER.parse(["pretrain", "--optimizer.bias_correction", "shards"]).corpus == ["shards"]


def test_short_names_are_keys():
    assert overrides("--lr", "1e-3", "--epochs=2") == {"finetune.learning_rate": "1e-3", "finetune.epochs": "2"}
    assert overrides("--lr", "1e-3", "--finetune.learning-rate", "1e-3") == {"finetune.learning_rate": "1e-3"}
    with pytest.raises(InputError, match="--lr/--finetune.learning_rate: expected one value, got 1e-3 and 1e-4"):
        overrides("--lr", "1e-3", "--finetune.learning-rate", "1e-4")
    for command, (configuration, *others) in CONFIGURED.items():
        keys = {
            option.option_strings[-1]: option.option_strings
            for option in options(command)
            if isinstance(option, KeyOption)
        }
        short = {} if others and command != "adapt" else configuration.SHORT_NAMES
        assert {name: f"--{key}" for name, key in short.items()} == {
            names[0][2:].replace("-", "_"): key for key, names in keys.items() if len(names) > 1
        }


def test_arguments_in_any_order():
    options = PARSER.parse(["-q", "pretrain", "--steps", "5", "a", "--train.seed=1", "b", "--out", "o", "--", "-c"])
    assert options.corpus == ["a", "b", "-c"] and options.quiet and str(options.out) == "o"
    assert options.overrides == {"train.steps": "5", "train.seed": "1"}
    assert PARSER.parse(["predict", "-", "m"]).model.name == "-"


# Options without a Python argument: for output, and those that Python passes as a `Config` or an executor.
ONLY_OF_COMMANDS = {"help", "help_all", "quiet", "json", "dry_run", "preset", "recipe", "scheduler"}


@pytest.mark.parametrize("command", PARSER.commands)
def test_command_has_function_with_same_arguments(command):
    function = getattr(ef, "import_" if command == "import" else command)
    parameters = inspect.signature(function).parameters
    arguments = [argument for argument in PARSER.commands[command]._actions if not isinstance(argument, KeyOption)]
    positional = [argument.dest for argument in arguments if not argument.option_strings]
    options = {argument.dest for argument in arguments if argument.option_strings} - ONLY_OF_COMMANDS
    assert list(parameters)[: len(positional)] == positional and options <= parameters.keys()
    keyword_only = {name for name, argument in parameters.items() if argument.kind is argument.KEYWORD_ONLY}
    assert options - {"config"} <= keyword_only
    if command == "finetune":
        assert FinetuningConfig.SHORT_NAMES.keys() <= keyword_only


def test_option_means_the_same_in_every_command():
    have = {word: {command for command in PARSER.commands if f"--{word}" in flags_of(command)} for word in WORDS}
    assert have == {word: set(commands.split()) for word, commands in WORDS.items()}


@pytest.mark.parametrize(("former", "now"), {"train_vocab": "vocab", "import_folder": "import_"}.items())
def test_former_python_names_get_suggestions(former, now):
    with pytest.raises(AttributeError, match=f"^electra_fast.{former} is now electra_fast.{now}$"):
        getattr(ef, former)
    assert not hasattr(ef, "nothing") and hasattr(ef, now)

"""Presets compared with the paper's table, TOML round trips, and the message for every error."""

import itertools
import random
import re
import tomllib
from pathlib import Path

import pytest

from electra_fast.cli import commands
from electra_fast.cli.parser import build_parser
from electra_fast.config.config import Config, ObjectiveConfig, OptimizerConfig
from electra_fast.config.presets import OBJECTIVE_SPECS, RECIPES, SIZE_RECIPES, SIZES, YOUNGER_KEYS
from electra_fast.config.section import Configuration
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.hardware.flops import flops_per_token

# layers, hidden, FFN, heads, embedding; generator's hidden, FFN, heads; length, batch, rate, steps
TABLE = {
    "small": ((12, 256, 1024, 4, 128), (64, 256, 1), (128, 128, 5e-4, 1_000_000)),
    "base": ((12, 768, 3072, 12, 768), (256, 1024, 4), (512, 256, 2e-4, 766_000)),
    "large": ((24, 1024, 4096, 16, 1024), (256, 1024, 4), (512, 2048, 2e-4, 400_000)),
}


BASE_KEYS = {"train.log_every": 7, "train.eval_every": 77, "optimizer.beta1": 0.95, "model.num_heads": 8}


def as_table(values: dict[str, object]) -> dict[str, dict[str, object]]:
    table: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        table.setdefault(section, {})[key] = value
    return table


@pytest.mark.parametrize("name", TABLE)
def test_presets_have_the_published_sizes(name: str) -> None:
    config = Config.preset(name, "google")
    model = config.model
    small = config.generator_shape()
    sizes, generator, training = TABLE[name]
    actual = (model.num_layers, model.hidden_size, model.intermediate_size, model.num_heads, model.embedding_size)
    assert actual == sizes
    assert (small.hidden_size, small.intermediate_size, small.num_heads) == generator
    assert (small.num_layers, small.embedding_size) == (model.num_layers, model.embedding_size)
    train = config.train
    rate = config.optimizer.learning_rate
    assert (config.data.sequence_length, train.batch_size, rate, train.steps) == training
    assert config.optimizer.num_warmup_steps(config.train.steps) == 10_000
    assert (config.objective.gen_weight, config.objective.disc_weight) == (1.0, 50.0)


@pytest.mark.parametrize("name", SIZES)
def test_modern_presets_have_published_flops(name: str) -> None:
    """GeGLU's width compensates for its third matrix, and all widths are multiples of the kernels' tiles."""
    google = Config.preset(name, "google")
    modern = Config.preset(name, "modern")
    costs = [flops_per_token(config.with_objective("mlm"), of_all_tokens=True).generator for config in (google, modern)]
    assert costs[1] == pytest.approx(costs[0], rel=0.03)
    tile = 8 if name == "tiny" else 16
    for shape in (modern.model, modern.generator_shape()):
        assert shape.intermediate_size % tile == 0 and shape.hidden_size % tile == 0
    same = ("num_layers", "hidden_size", "num_heads", "embedding_size")
    assert [getattr(modern.model, key) for key in same] == [getattr(google.model, key) for key in same]


@pytest.mark.parametrize("recipe", ["paper", "google", "modern"])
def test_mini_is_a_third_of_small(recipe: str) -> None:
    mini = Config.preset("mini", recipe)
    small = Config.preset("small", recipe)
    train = ("batch_size", "steps", "log_every", "eval_every", "checkpoint_every")
    assert mini.differences(small).keys() == {"model.num_layers", *(f"train.{name}" for name in train)}
    assert mini.train.batch_size * mini.data.sequence_length == 4096
    assert 20e6 < mini.train.steps * 4096 < 21e6  # an hour or two on two cores


def test_differences_of_recipes() -> None:
    paper = Config.preset("large", "paper")
    google = Config.preset("large", "google")
    assert (paper.data.mask_prob, google.data.mask_prob) == (0.15, 0.25)
    assert (paper.optimizer.name, google.optimizer.name) == ("lamb", "adamw")
    assert (paper.optimizer.bias_correction, google.optimizer.bias_correction) == (True, False)
    assert (paper.optimizer.schedule, google.optimizer.schedule) == ("linear", "product")
    assert (paper.data.masking, google.data.masking) == ("tokens", "with-repeats")
    assert (paper.data.packing, google.data.packing) == ("best-fit", "examples")
    for config in (paper, google):
        optimizer = config.optimizer
        assert (optimizer.epsilon, optimizer.weight_decay, optimizer.beta1, optimizer.beta2) == (1e-6, 0.01, 0.9, 0.999)
        assert (config.model.architecture, config.model.dropout, config.model.attention_dropout) == ("bert", 0.1, 0.1)
    modern = Config.preset("tiny", "modern")
    assert (modern.model.architecture, modern.model.dropout, modern.optimizer.name) == ("modernbert", 0.0, "muon")


NASTY = [*"\"'\\\n\r\t\b\x1f\x7f\x85\u2028\ufeff#=[]{},: é\U0001f642", "${x}", "\\u0041", '"""', "a.b", "true", "1"]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(NASTY, k=rng.randrange(6)))


def random_value(rng: random.Random, configuration: type[Configuration], name: str) -> object:
    """Returns a value within a key's declared range."""
    default = configuration().value(name)
    bounds = configuration._fields()[name].metadata
    low = max(-1e9, bounds["low"])
    high = min(1e9, bounds["high"])
    if bounds["takes_several"]:
        names = [random_text(rng) for _ in range(rng.randint(1, 3))]
        return rng.choice([names[0], names, {corpus: rng.choice([3, 1e-7, 1e22, 0.1]) for corpus in names}])
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, int) or bounds["or_auto"]:
        return rng.randint(int(low), int(high))
    if isinstance(default, float):
        return float(rng.choice([rng.uniform(low, high), high, min(high, low + 1e-7)]))
    return random_text(rng)


@pytest.mark.parametrize("configuration", [Config, FinetuningConfig])
def test_toml_round_trip_of_any_value(configuration: type[Configuration]) -> None:
    rng = random.Random(13)
    changed = set()
    for name in configuration.key_names() * 12:
        value = random_value(rng, configuration, name)
        try:
            config = configuration().override({name: value})
        except ValueError:  # an invalid choice, or a choice that requires other keys to change
            continue
        parsed = configuration()._replace(configuration.values_of_file(tomllib.loads(config.to_toml())))
        assert parsed == config and parsed.value(name) == value and type(parsed.value(name)) is type(value)
        changed |= parsed.differences(configuration()).keys()
    assert len(changed) > 0.6 * len(configuration.key_names())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("train.steps", text, 100_000) for text in ("1e5", "100k", "100K", "1_00_000", "0.1M", 100_000, 1e5)),
        *(("data.cache_bytes", text, 2 * 10**11) for text in ("200GB", "200gb", "200 GB", "200G", "2e11", "0.2TB")),
        *(("data.cache_bytes", text, 2**34) for text in ("16GiB", "16384MiB", f"{2**34}B")),
        *(("train.max_minutes", text, 240.0) for text in ("4h", "240m", "240 min", "240", 240, "3h60m", "14400s")),
        *(("train.timeout_seconds", text, 600) for text in ("10m", "600s", "600", "1e1m")),
        *(("optimizer.learning_rate", text, 1 / 2**11) for text in ("1/2048", 1 / 2**11, f"{1 / 2**11}")),
        *(("objective.disallow_correct", text, True) for text in (True, "true", "True")),
        ("optimizer.warmup_steps", "-1", -1),
        *(("train.accumulate", str(value), value) for value in ("auto", 4)),
        ("data.corpus", {"a": 1, "b": 0.5}, {"a": 1, "b": 0.5}),
    ],
)
def test_units_and_typed_values(name: str, text: object, value: object) -> None:
    for config in (Config().override({name: text}), Config.of_table(as_table({name: text}))):
        assert config.value(name) == value and type(config.value(name)) is type(value)


def test_keys_have_names_without_a_section() -> None:
    config = Config.preset("tiny", "google").override({"model.num_layers": 1}, steps="5k", lr=1e-3, mask_prob=0.3)
    assert (config.model.num_layers, config.train.steps, config.optimizer.learning_rate) == (1, 5000, 1e-3)
    assert config.data.mask_prob == 0.3 and FinetuningConfig().override(lr=1e-5).finetune.learning_rate == 1e-5
    assert {*Config.SHORT_NAMES.values()} <= {*Config.key_names()}
    for changes, by_name, message in (
        ({}, {"num_layers": 1}, "num_layers is ambiguous: model.num_layers or generator.num_layers; use the full key"),
        ({"train.steps": 1}, {"steps": 2}, "train.steps has two values, 1 and 2; pass one"),
        ({}, {"train": {"steps": 1}}, "train is a section; use a key in it, train.KEY"),
        ({}, {"mlm_probability": 1}, "unknown key mlm_probability; did you mean data.mask_prob?"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
            config.override(changes, **by_name)
    assert config.override({"train.steps": 7}, steps=7).train.steps == 7
    assert "peak learning rate" in (OptimizerConfig.__doc__ or "")  # in `help(config.optimizer)`


def test_toml_describes_every_key() -> None:
    text = Config().to_toml()
    for name in Config.key_names():
        key = name.partition(".")[2]
        assert re.search(rf"^{key} = ", text, re.MULTILINE), name
        assert Config.describe_key(name)
    assert Config.describe_key("model.tying").endswith("(none, embeddings, disentangled, all)")


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_precedence_of_preset_file_and_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'preset = "base"\nrecipe = "paper"\n[train]\nsteps = 5\nseed = 3\n[optimizer]\nclip_norm = 2\n'
    )
    config = Config.load(
        path, {"train.steps": "1_000", "generator.fraction": "1/4", "optimizer.bias_correction": "False"}
    )
    assert (config.train.steps, config.train.seed) == (1000, 3)
    assert config.optimizer.clip_norm == 2.0 and type(config.optimizer.clip_norm) is float
    assert (config.optimizer.name, config.optimizer.bias_correction) == ("lamb", False)
    assert (config.model.hidden_size, config.generator.fraction) == (768, 0.25)
    assert config.override({"model.attention": "sdpa"}).model.attention == "sdpa"


def of_command_line(*words: object) -> Config:
    return commands._config(build_parser().parse(["flops", *map(str, words)]))


@pytest.mark.parametrize("preset", [None, *SIZES])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_preset_and_recipe_in_python_file_and_command_line(
    preset: str | None, recipe: str | None, tmp_path: Path
) -> None:
    """The result is the same in Python, in a file and on the command line; the defaults are small and modern."""
    names = {name: value for name, value in (("preset", preset), ("recipe", recipe)) if value}
    config = Config.preset(preset or "small", recipe or "modern")
    path = write(tmp_path, "".join(f'{name} = "{value}"\n' for name, value in names.items()))
    flags = (word for name, value in names.items() for word in (f"--{name}", value))
    assert config == Config.load(path) == of_command_line("--config", path) == of_command_line(*flags)
    chosen = (config.model.architecture, config.data.packing)
    assert names or (config == Config() and chosen == ("modernbert", "best-fit"))


@pytest.mark.parametrize("preset", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_configuration_keeps_its_meaning(preset: str, recipe: str, tmp_path: Path) -> None:
    """Also tests files from before keys whose default changes the run."""
    config = Config.preset(preset, recipe)
    older = config.override(YOUNGER_KEYS)
    tables = tomllib.loads(config.to_toml())
    assert Config.load(write(tmp_path, config.to_toml())) == config == Config.of_table(tables)
    for name in YOUNGER_KEYS:
        section, _, key = name.partition(".")
        del tables[section][key]
    assert Config.of_table(tables) == older and older.objective.corrective_weight == 0
    set_by_presets = {*itertools.chain(*SIZES.values(), *RECIPES.values(), *SIZE_RECIPES.values())}
    values = {name: config.value(name) for name in set_by_presets - YOUNGER_KEYS.keys()}
    assert Config.of_table(as_table(values)) == older
    assert Config.of_table({}, values).objective.corrective_weight == 1  # from the command line, not from a file
    assert Config.of_table({"optimizer": tables["optimizer"]}).objective == ObjectiveConfig()  # not saved by a run


@pytest.mark.parametrize("name", OBJECTIVE_SPECS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_objective_sets_required_keys_unless_set(recipe: str, name: str, tmp_path: Path) -> None:
    config = Config.preset("mini", recipe, name)
    plain = Config.preset("mini", recipe)
    needs = OBJECTIVE_SPECS[name].needs
    assert plain.differences(config).keys() <= {"objective.name", *needs} and config.objective.name == name
    text = f'preset = "mini"\nrecipe = "{recipe}"\n'
    assert Config.load(write(tmp_path, text), {"objective.name": name}) == config
    path = write(tmp_path, f'{text}[objective]\nname = "{name}"\n')
    assert Config.load(path) == config and Config.load(path, {"objective.name": "electra"}) == plain
    for key, value in (("data.masking", "with-repeats"), ("generator.fraction", 0.75), ("generator.kind", "unigram")):
        if value in needs.get(key, (value,)):
            assert Config.load(path, {key: value}).value(key) == value
        else:
            with pytest.raises(ValueError, match=f'objective.name = "{name}": needs .*{key} = '):
                Config.load(path, {key: value})


@pytest.mark.parametrize("changes", [{}, {"train.steps": 7}, {"data.corpus": {"a b": 1.0}, **BASE_KEYS}])
@pytest.mark.parametrize("objective", ["electra", "mlm"])
def test_repr_has_preset_recipe_and_changes(changes: dict[str, object], objective: str) -> None:
    """Evaluating it restores the configuration, from one line or several."""
    config = Config.preset("mini", "google", objective).override(changes)
    argument = "" if objective == "electra" else ", 'mlm'"
    assert repr(config).startswith(f"Config.preset('mini', 'google'{argument})")
    assert eval(repr(config)) == config and all(f"{key!r}: " in repr(config) for key in changes)
    assert max(map(len, repr(config).splitlines())) <= 110


def test_differences() -> None:
    config = Config()
    assert config.differences(config) == {}
    other = config.override({"train.steps": "7", "model.dropout": "0.1"})
    assert config.differences(other) == {"model.dropout": (0.0, 0.1), "train.steps": (1_000_000, 7)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]\nnum_layers = 1", "unknown section [modle]; did you mean model?"),
        ("[train]\nstep = 1", "unknown key train.step; did you mean train.steps?"),
        ("[generator]\nqqq = 1", "unknown key generator.qqq; must be one of kind, fraction, num_layers"),
        ("[train]\nsteps = 1.5", "train.steps = 1.5: must be an integer, not a number"),
        ('[train]\nsteps = "10 rows"', "train.steps = '10 rows': must be an integer, such as 10000 or 10k"),
        ("[model]\ntying = 1", "model.tying = 1: must be a string, not an integer"),
        ("[optimizer]\nbias_correction = 1", "optimizer.bias_correction = 1: must be true or false, not an integer"),
        ("[optimizer]\nlearning_rate = [1]", "optimizer.learning_rate = [1]: must be a number, not list"),
        ('[model]\ntying = "some"', "model.tying = 'some': must be one of none, embeddings, disentangled, all"),
        ("[train]\nsteps = 0", "train.steps = 0: must be at least 1"),
        ("[data]\nmask_prob = 0.95", "data.mask_prob = 0.95: must be above 0 and at most 0.9"),
        ("[data]\nmask_prob = 0", "data.mask_prob = 0.0: must be above 0 and at most 0.9"),
        ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate = nan: must be at least 0"),
        ("[model]\nnum_heads = 5", "model.num_heads = 5: must divide model.hidden_size = 256"),
        ('[model]\narchitecture = "modernbert"\nhidden_size = 12\nnum_heads = 4', "model.num_heads = 3: must be even"),
        ('recipe = "paper"\n[model]\nlocal_attention = 8', "model.local_attention = 8: needs model.architecture = "),
        ("[data]\nsequence_length = 1024", "sequence_length = 1024: must be at most model.max_positions = 512; raise"),
        ("[train]\naccumulate = true", "train.accumulate = True: must be an integer, not true or false"),
        ("[train]\naccumulate = 3", "train.accumulate = 3: must divide train.batch_size = 128"),
        ("[generator]\nfraction = 0.3", "generator.fraction = 0.3: must leave a whole number of heads"),
        ('[model]\ntying = "all"', "needs a generator of the same size; set generator.fraction = 1.0"),
        ("[model]\nconv_kernel_size = 3", "model.conv_kernel_size = 3: must be odd, and needs model.architecture ="),
        (
            '[model]\narchitecture = "deberta"\nconv_kernel_size = 4',
            "model.conv_kernel_size = 4: must be odd, and needs",
        ),
        (
            'recipe = "deberta"\npreset = "tiny"\n[model]\nconv_kernel_size = 3',
            "model.conv_kernel_size = 3: needs a generator of 2 layers or more",
        ),
        ("[generator]\nembedding_size = 64", "generator.embedding_size = 64: needs model.tying = "),
        ('preset = "smal"', "unknown preset 'smal'; did you mean small?"),
        ('preset = "small"\nrecipe = "gogle"', "unknown recipe 'gogle'; did you mean google?"),
        ('preset = "small"\n[objective]\nname = "mml"', "objective.name = 'mml': must be one of electra, mlm"),
        ('preset = "small"\nobjective = "mlm"', "must be a table, [objective]"),
        ('recipe = "gogle"', "unknown recipe 'gogle'; did you mean google?"),
        ("[train\nsteps = 1", "Expected ']' at the end of a table declaration"),
    ],
)
def test_error_in_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.stepz": "1"}, "unknown key train.stepz; did you mean train.steps?"),
        ({"step": "1"}, "unknown key step; did you mean train.steps?"),
        ({"qqqqqqqq": "1"}, "unknown key qqqqqqqq; see --help"),
        ({"train.lr": "1"}, "unknown key train.lr; did you mean optimizer.learning_rate?"),
        ({"model.num_layer": "1"}, "unknown key model.num_layer; did you mean model.num_layers?"),
        *(
            ({"train.steps": text}, f"train.steps = {text!r}: must be an integer, such as 10000 or 10k")
            for text in ("many", "1.5", "4h", "1e999", "1/2", "")
        ),
        *(
            ({"generator.fraction": text}, f"generator.fraction = {text!r}: must be a number")
            for text in ("1/0", "1k", "nan", "1e999")
        ),
        ({"data.cache_bytes": "4h"}, "data.cache_bytes = '4h': must be a number of bytes, such as 200GB or 16GiB"),
        ({"train.max_minutes": "1h30"}, "train.max_minutes = '1h30': must be a number of minutes, such as 90 or 1h30m"),
        ({"train.steps": None}, "train.steps = None: must be an integer, not NoneType"),
        *(
            ({key: value}, f"{key} = {value!r}: must not have NUL or invalid UTF-8; rename the file or folder")
            for text in ("caf\udce9", "a\0b")
            for key, value in (("train.out", text), ("data.corpus", [text]), ("data.corpus", {text: 1.0}))
        ),
        ({"optimizer.bias_correction": "1"}, "optimizer.bias_correction = '1': must be true or false"),
    ],
)
def test_error_on_command_line_is_one_line(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Config().override(overrides)


@pytest.mark.parametrize(("name", "default"), [("train.capture_collectives", "false"), ("train.skip_spikes", "0")])
def test_removed_key_is_accepted_at_its_default(tmp_path: Path, name: str, default: str) -> None:
    section, _, key = name.partition(".")
    for value, refused in ((default, False), ("true", True), ("3", True)):
        path = write(tmp_path, Config().to_toml().replace(f"[{section}]", f"[{section}]\n{key} = {value}"))
        if not refused:
            assert Config.load(path) == Config.of_table(tomllib.loads(path.read_text())) == Config()
            assert Config().override({name: value}) == Config()
            continue
        with pytest.raises(ValueError, match=f"^{path}: {name} = {value.title()}: this key was removed"):
            Config.load(path)
        with pytest.raises(ValueError, match=f"^{name} = '{value}': this key was removed"):
            Config().override({name: value})


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.toml: no such configuration file"):
        Config.load(tmp_path / "none.toml")
    path = tmp_path / "latin.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ValueError, match="latin.toml: not UTF-8 at byte 5"):
        Config.load(path)


def test_mlm_accepts_fractional_generator_heads() -> None:
    Config().override({"objective.name": "mlm", "generator.fraction": 0.3})

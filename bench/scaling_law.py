"""Fits the law of size, tokens and repeated text to the runs of data/recipes.jsonl.

    python bench/scaling_law.py [--draws 200] [--picture]

The measure is 1 - AUC on validation text corrupted by a fixed masked language model. The runs have the recipe `modern`
at scale `mini` with any shape, batch and amount of text, and left the plateau on which a discriminator knows only token
frequencies. Prints the constants of `electra_fast.training.forecast` with 90 % intervals from bootstrap samples, each
point with its prediction from a fit without it, and the predicted errors of shapes for budgets of FLOPs.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from lib.groups import BENCH
from lib.recipe_report import auc, score
from lib.recipe_studies import HOUR, SCALES, STUDIES, TFLOP, Setting
from lib.results import markdown
from recipes import update_flops
from scipy.optimize import least_squares, minimize_scalar

import electra_fast as ef
from electra_fast.hardware.flops import flops_per_token as network_flops
from electra_fast.training.forecast import ScalingLaw, layer_weights

LOWEST_AUC = 0.6
"""Below, on the plateau and at its end, no law of sizes and tokens holds. Runs on repeated text are beyond it."""
SCALE = "mini"
CORPUS_TOKENS = 86_443_783
OURS = ("modern", "2 layers of 64", "2 layers of 128", "4 layers of 128")
MASK_PROB = {**dict.fromkeys(OURS, 0.25), "mlm": 0.35, "google-rotary": None}
"""The recipes whose tasks are drawn, as they are now."""
LEGEND = {
    "modern": "recipe modern",
    "google-rotary": "published recipe + rotary positions",
    "mlm": "MLM, same encoder as modern",
}
SHAPES = [shape for shape in STUDIES["sizes"] if shape.batch_factor == 1]
BUDGETS = (10, 30, 90, 270, 800, 2_400, 7_200)
"""TFLOP of the table of shapes."""
PICTURE = BENCH.parent / "docs/images/scaling.png"
SETTINGS = {
    setting.name: setting for setting in (STUDIES["curves"][0], *STUDIES["sizes"], *STUDIES["epochs"], *HOUR[0])
}


@dataclass(frozen=True)
class Point:
    """Runs that differ in the seed only: weights of the layers, tokens read, tokens of the text, mean of 1 - AUC."""

    shape: str
    weights: int
    tokens: int
    text: float
    error: float
    seeds: int

    @property
    def epochs(self) -> float:
        return self.tokens / self.text


def lines(path: Path = BENCH / "data/recipes.jsonl") -> list[dict[str, Any]]:
    """Reads the results on the text that the last run was evaluated on; of two with equal settings, the later one."""
    records = [line for line in map(json.loads, path.read_text().splitlines()) if line["run"]["scale"] == SCALE]
    last = records[-1]["run"]["judged_on"]
    return [*{str(line["run"]): line for line in records if line["run"]["judged_on"] == last}.values()]


def points(path: Path = BENCH / "data/recipes.jsonl") -> list[Point]:
    errors_by_run: dict[tuple[str, int, int, float], list[float]] = {}
    for line in lines(path):
        keys = line["run"]["keys"]
        result = line["result"]
        setting = SETTINGS.get(line["name"])
        if setting is None or keys.get("data.mask_prob") != 0.25 or not result.get("tokens"):
            continue
        if "data.sequence_length" in keys:  # other rows than the default's
            continue
        model = _config({key: str(value) for key, value in keys.items()}).model
        tokens = float(f"{result['tokens']:.3g}")  # seeds may differ by the rest of a batch
        name = f"{model.num_layers} x {model.hidden_size}"
        key = (name, layer_weights(model), round(tokens), CORPUS_TOKENS / setting.parts)
        errors_by_run.setdefault(key, []).append(1 - auc(result))
    means = [Point(*key, statistics.mean(errors), len(errors)) for key, errors in errors_by_run.items()]
    past = [point for point in means if point.error <= 1 - LOWEST_AUC or point.epochs > 1]
    return sorted(past, key=lambda point: (point.weights, point.tokens, point.epochs))


def fit(known: Sequence[Point]) -> ScalingLaw:
    """Returns the law of least squares in the logarithm of the error: of fresh text, then the worth of repeats."""
    fresh = [point for point in known if point.epochs <= 1]
    weights, tokens, errors = np.array([(point.weights / 1e6, point.tokens / 1e6, point.error) for point in fresh]).T

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        floor, size, alpha, data, beta = np.exp(logarithms)
        return np.asarray(np.log((floor + size * weights**-alpha + data * tokens**-beta) / errors))

    starts = [np.log([floor, 0.02, alpha, 0.3, 0.7]) for floor in (0.01, 0.08) for alpha in (0.2, 0.8)]
    solved = (least_squares(residuals, start, bounds=(math.log(1e-4), math.log(10))) for start in starts)
    constants = np.exp(min(solved, key=lambda solution: float(solution.cost)).x).tolist()
    repeated = [point for point in known if point.epochs > 1]

    def worth(logarithm: float) -> float:
        law = ScalingLaw(*constants, math.exp(logarithm))
        return sum(_residual(law, point) ** 2 for point in repeated)

    bounds = (math.log(0.1), math.log(1000))
    epochs = math.exp(minimize_scalar(worth, bounds=bounds, method="bounded").x) if repeated else math.nan
    return ScalingLaw(*constants, epochs)


def _residual(law: ScalingLaw, point: Point) -> float:
    return math.log(point.error / law.error(point.weights, point.tokens, point.text))


def intervals(known: Sequence[Point], draws: int, measure: Callable[[ScalingLaw], Sequence[float]]) -> np.ndarray:
    """The 5th and 95th percentiles of a quantity of the law, over bootstrap samples of the points with fresh text."""
    random_ = random.Random(0)
    fresh, repeated = ([point for point in known if (point.epochs > 1) == is_repeated] for is_repeated in (False, True))
    estimates = [measure(fit(random_.choices(fresh, k=len(fresh)) + repeated)) for _ in range(draws)]
    return np.percentile(estimates, (5, 95), axis=0)


def report(known: Sequence[Point], draws: int) -> Iterator[str]:
    law = fit(known)
    low, high = intervals(known, draws, astuple)
    rows = [
        [field.name, f"{value:.3g}", f"{lowest:.3g} to {highest:.3g}"]
        for field, value, lowest, highest in zip(fields(law), astuple(law), low, high, strict=True)
    ]
    yield markdown(["constant", "value", "90 % of the draws"], rows)
    rows = []
    missed = []
    for point in known:
        others = fit([other for other in known if other != point])
        expected, held_out = (law_.error(point.weights, point.tokens, point.text) for law_ in (law, others))
        missed.append(point.error / held_out - 1)
        cells = [f"{point.tokens / 1e6:.3g} M", f"{point.epochs:.2g}", f"{point.error:.3f}", f"{expected:.3f}"]
        rows.append([point.shape, *cells, f"{held_out:.3f}", str(point.seeds)])
    yield markdown(["layers x width", "tokens", "epochs", "1 - AUC", "law", "law without it", "seeds"], rows)
    spread = math.sqrt(statistics.mean(error**2 for error in missed))
    yield markdown(["TFLOP", *(shape.name for shape in SHAPES)], list(shapes_by_budget(law)))
    yield f"Points are missed by {spread:.1%} (root of the mean square) by fits without them."


def flops_per_token(setting: Setting) -> float:
    """FLOPs per token of pre-training as the runs' budgets count them, the optimizer's included."""
    config = _config(setting.keys)
    rows = setting.batch_factor * int(SCALES[SCALE].keys["train.batch_size"])
    return network_flops(config, of_all_tokens=True).total + update_flops(config) / (rows * config.data.sequence_length)


def _config(keys: Mapping[str, str]) -> ef.Config:
    sizes = {key: value for key, value in keys.items() if key.startswith(("model.", "generator."))}
    config = ef.Config.preset("mini", "modern").override({**sizes, "model.vocab_size": str(SCALES[SCALE].vocab_size)})
    return config.resolved()


def tasks() -> dict[str, dict[float, list[float]]]:
    """The mean scores of fine-tuned models, by setting and minutes of two cores.

    The runs of an hour took that long. Those with a budget of FLOPs count as long as our run of an hour takes for them.
    """
    curves: dict[str, dict[float, list[float]]] = {}
    a_minute = 60 * HOUR[0][0].tokens_per_second * flops_per_token(HOUR[0][0])
    for line in lines():
        result = line["result"]
        budget = line["run"]["budget"]
        trainer = line["run"].get("trainer")
        name = "modern" if line["name"] == "electra-fast" else trainer or line["name"]
        is_current = line["run"]["keys"].get("data.mask_prob") == MASK_PROB.get(name)
        if (name in MASK_PROB or trainer) and is_current and "tasks" in result and result["tokens"]:
            minutes = budget / a_minute if budget else 60.0
            curves.setdefault(name, {}).setdefault(round(minutes, 2), []).append(score(result))
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def shapes_by_budget(law: ScalingLaw) -> Iterator[list[str]]:
    """Yields the law's prediction for each shape with a budget, and the tokens that it reads."""
    costs = [flops_per_token(size) for size in SHAPES]
    weights = [layer_weights(_config(size.keys).model) for size in SHAPES]
    for budget in BUDGETS:
        read = [budget * TFLOP / cost for cost in costs]
        errors = [law.error(*arguments) for arguments in zip(weights, read, strict=True)]
        cells = [
            f"{error:.3f} ({tokens / 1e6:.{0 if tokens > 1e7 else 1}f} M)"
            if error <= 1 - LOWEST_AUC
            else "on the plateau"
            for error, tokens in zip(errors, read, strict=True)
        ]
        best = errors.index(min(errors))
        yield [f"{budget:,}", *(f"**{cell}**" if i == best else cell for i, cell in enumerate(cells))]


def draw(known: Sequence[Point], law: ScalingLaw, path: Path = PICTURE) -> None:
    """Draws the law, and the tasks' scores of our recipe and others with intervals over the seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for color, shape in enumerate(dict.fromkeys(point.shape for point in known)):
        of_shape = [point for point in known if point.shape == shape and point.epochs <= 1]
        line = np.geomspace(of_shape[0].tokens, of_shape[-1].tokens)
        left.loglog(line / 1e6, [law.error(of_shape[0].weights, tokens) for tokens in line], color=f"C{color}")
        left.plot(
            [point.tokens / 1e6 for point in of_shape],
            [point.error for point in of_shape],
            "o",
            color=f"C{color}",
            label=shape,
        )
    left.set(title="layers x width: runs, and the law", xlabel="million tokens", ylabel="1 - AUC")
    for place, (name, curve) in enumerate(tasks().items()):
        means = [statistics.mean(scores) for scores in curve.values()]
        margins = [[mean - min(scores), max(scores) - mean] for mean, scores in zip(means, curve.values(), strict=True)]
        label = LEGEND.get(name, name)
        bars = [*zip(*margins, strict=True)]
        right.errorbar([x * 1.02**place for x in curve], means, bars, marker="o", label=label)
    right.set(
        title="mean of five tasks, range over seeds",
        xscale="log",
        ylabel="percent",
        xlabel="minutes of two cores",
        ylim=(42, 70),
    )
    left.set_yticks(errors := [0.1, 0.15, 0.2, 0.3, 0.4], map(str, errors))
    for axis, ticks in ((left, [1, 2, 5, 10, 20, 50]), (right, [1, 2, 5, 10, 20, 60])):
        axis.set_xticks(ticks, map(str, ticks))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.legend(fontsize="small")
    right.legend(fontsize="x-small", loc="upper left", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200, help="of the points, for the intervals")
    parser.add_argument("--picture", action="store_true", help="draw docs/images/scaling.png")
    options = parser.parse_args()
    known = points()
    for text in report(known, options.draws):
        print(text, end="\n\n")
    if options.picture:
        draw(known, fit(known))


if __name__ == "__main__":
    sys.exit(main())

"""`evaluate` on minimal pairs: how often the better sentence scores higher (BLiMP, arXiv 1912.00582)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from electra_fast.config.config import AUTO
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.prediction_input import ExampleReader, Source, open_examples
from electra_fast.finetuning.readers.delimited import Dialect
from electra_fast.finetuning.readers.rows import Row, as_names, available_columns, place, text_of
from electra_fast.finetuning.readers.table_formats import file_or_table
from electra_fast.finetuning.scoring import TextScorer
from electra_fast.messages import say
from electra_fast.results import Result

# Columns with the group of a pair in BLiMP and similar files; the first one in a file is used.
_GROUP_COLUMNS = ("UID", "paradigm")


@dataclass(frozen=True, eq=False, repr=False)
class PairsReport(Result):
    """The fraction of pairs in which each score ranks the better sentence first; a tie counts half.

    Args:
        pairs: Number of pairs.
        accuracy: By score, the fraction averaged over the groups, as BLiMP reports it.
        interval: By score, the 95 % confidence interval of its accuracy.
        groups: By group, the number of pairs, and the fraction by score.
    """

    pairs: int
    accuracy: dict[str, float]
    interval: dict[str, tuple[float, float]]
    groups: dict[str, dict[str, float]]

    def lines(self) -> Iterator[str]:
        """Yields one line per score, and a table of the groups if there are several."""
        number = f"{self.pairs:,} pairs" + (f" in {len(self.groups)} groups" if len(self.groups) > 1 else "")
        yield f"{number}: percentage in which the better sentence scores higher, with its 95 % interval"
        for kind, share in self.accuracy.items():
            low, high = self.interval[kind]
            yield f"  {kind:<14}{100 * share:5.1f}  ({100 * low:.1f} to {100 * high:.1f})"
        if len(self.groups) > 1:
            width = max(map(len, self.groups))
            yield f"{'':<{width}}  {'pairs':>7}" + "".join(f"{kind:>15}" for kind in self.accuracy)
            for name, group in self.groups.items():
                shares = "".join(f"{100 * group[kind]:>15.1f}" for kind in self.accuracy)
                yield f"{name:<{width}}  {int(group['pairs']):>7,}{shares}"


class _Pairs(ExampleReader):
    """Reads rows with two sentences, the better one first."""

    usual_columns = (("sentence_good", "sentence_bad"), ("good", "bad"))

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> tuple[str, str, str]:
        better, worse = (text_of(path, line, row, column) for column in columns)
        return better, worse, place(path, line)


def evaluate_pairs(
    model: str | Path,
    pairs: Any,
    *,
    out: str | Path | None = None,
    device: str = AUTO,
    precision: str | None = None,
    text: str | Sequence[str] = (),
    group: str = "",
    quoting: str = "auto",
    delimiter: str = "",
    no_header: bool = False,
    skip_bad_rows: int = 0,
) -> PairsReport:
    """Evaluates a pre-trained model on minimal pairs; see `electra_fast.evaluate`."""
    columns = as_names(text)
    if len(columns) not in (0, 2):
        raise InputError(f"text = {', '.join(columns)}: must be two columns; pass the better sentence first")
    files = pairs if isinstance(pairs, list) and pairs and not isinstance(pairs[0], Mapping) else [pairs]
    all_pairs = list[tuple[str, str, str]]()
    members = dict[str, list[int]]()
    for file_or_rows in files:
        file = file_or_table("pairs", file_or_rows)
        source = Source(file, columns, (), 2, Dialect(quoting, delimiter, no_header), "auto", skip_bad_rows)
        with open_examples(_Pairs(), source) as examples:
            for pair, others in examples.rows:
                group_column = group or next((name for name in _GROUP_COLUMNS if name in others), "")
                if group and group not in others:
                    raise InputError(
                        f"{pair[2]}: no column {group!r}; {available_columns(others)}; choose with --group"
                    )
                name = str(others[group_column]) if group_column else file.name.split(".")[0]
                members.setdefault(name, []).append(len(all_pairs))
                all_pairs.append(pair)
        for note in examples.notes:
            say(note)
    scorer = TextScorer(model, device, precision or AUTO)
    sentences = [sentence for pair in all_pairs for sentence in pair[:2]]
    scores = scorer.score(sentences, scorer.kinds, lambda number: all_pairs[number // 2][2])
    better = {kind: values[::2] - values[1::2] for kind, values in scores.items()}
    if num_equal := int(np.sum([not any(differences) for differences in zip(*better.values(), strict=True)])):
        say(f"note: {num_equal:,} of {len(all_pairs):,} pairs have identical tokens in {model} and count half")
    shares = {kind: (difference > 0) + 0.5 * (difference == 0) for kind, difference in better.items()}
    groups = {
        name: {"pairs": len(indices)} | {kind: float(right[indices].mean()) for kind, right in shares.items()}
        for name, indices in members.items()
    }
    accuracy = {kind: float(np.mean([group[kind] for group in groups.values()])) for kind in shares}
    interval = {kind: _interval([(group[kind], int(group["pairs"])) for group in groups.values()]) for kind in shares}
    report = PairsReport(len(all_pairs), accuracy, interval, groups)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        lines = (
            json.dumps(
                {"better": all_pairs[pair][0], "worse": all_pairs[pair][1], "group": name}
                | {kind: values[2 * pair : 2 * pair + 2].tolist() for kind, values in scores.items()}
            )
            for name, indices in members.items()
            for pair in indices
        )
        replace_file(Path(out) / "pairs.jsonl", "".join(f"{line}\n" for line in lines))
        replace_file(Path(out) / "evaluation.json", report.to_json() + "\n")
        say(f"{Path(out) / 'evaluation.json'}: {len(all_pairs):,} pairs")
    return report


def _interval(groups: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean of fractions, by the normal distribution.

    Following Agresti and Coull (1998), two successes and two failures are added to each variance, so that fractions of
    0 and 1 also have an interval.
    """
    mean = sum(share for share, _ in groups) / len(groups)
    adjusted = [((share * number + 2) / (number + 4), number + 4) for share, number in groups]
    deviation = math.sqrt(sum(p * (1 - p) / number for p, number in adjusted)) / len(groups)
    return max(0.0, mean - 1.96 * deviation), min(1.0, mean + 1.96 * deviation)

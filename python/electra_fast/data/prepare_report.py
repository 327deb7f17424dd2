"""The report of `prepare` as data and as text: counts, and the tokens that each packing keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from electra_fast import _data
from electra_fast.data.corpus import Tokenizer
from electra_fast.data.mixture import Corpora, weighted_folders
from electra_fast.messages import printable
from electra_fast.results import Result

# Shown characters of a repeated line.
SHOWN = 60
# The row lengths of the published presets.
LENGTHS = (128, 512)


@dataclass(frozen=True)
class RepeatCount:
    """Repeated ones among `total` documents or lines with text: an estimate unless all were counted."""

    total: int
    repeated: int
    sampled: int
    """N if one in N of the distinct texts was counted."""

    def __str__(self) -> str:
        share = f"{self.repeated / max(1, self.total):.1%}"
        if self.sampled == 1:
            return f"{self.repeated:,} of {self.total:,} ({share})"
        return f"about {share} of {self.total:,} (estimated from 1 of {self.sampled})"


@dataclass(frozen=True)
class Repeats:
    """Exact duplicates in the text as read; trailing whitespace and blank lines do not count."""

    documents: RepeatCount
    lines: RepeatCount
    most_repeated: tuple[tuple[str, int], ...]
    """The ten most repeated lines (their first 200 bytes) with their numbers of occurrences."""
    most_repeated_error: int
    """An unlisted line occurs at most this often, or less often than the listed lines. If `lines` is an estimate, a
    listed line may occur up to this many times more than its count."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PrepareReport(Result):
    """The outcome of `prepare`; counts exclude validation documents."""

    out: str
    """The corpus: its folder or URL."""
    complete: bool
    """Whether the folder is a complete corpus; `False` if input groups of other partitions are missing."""
    already_complete: bool
    """Whether the corpus was already complete, with the same inputs and options."""
    num_files: int
    skipped_files: int
    """Files of other kinds, in folders or matched by globs, that were skipped."""
    skipped_bytes: int
    skipped_kinds: tuple[str, ...]
    """The extensions of up to three kinds with the most of these bytes."""
    read_bytes: int
    skipped_splits: tuple[str, ...]
    """Splits of saved datasets that were not read, because `train` was."""
    num_input_groups: int
    """Units of work: files, or parts of large files."""
    missing_input_groups: int
    unhashed_input_groups: int = 0
    """Input groups that other partitions have not hashed yet; to drop duplicates, all text is hashed first."""
    num_documents: int
    num_tokens: int
    empty_documents: int
    """Documents without tokens, which are skipped."""
    holdout_documents: int
    dropped_documents: int = 0
    """Documents dropped because they, or for `emptied_documents` all their lines, had occurred before."""
    emptied_documents: int = 0
    dropped_lines: int = 0
    repeats: Repeats | None = None
    """Repeated text; `None` while incomplete, or if the corpus was already complete, or if an older release prepared
    part of it."""
    skipped_rows: int = 0
    """JSON records that could not be read and were skipped; a complete corpus lists them in `skipped.jsonl`."""
    first_skipped: tuple[tuple[str, int, str], ...] = ()
    """File, line and reason of the first ten skipped rows."""
    rebuilt_input_groups: int = 0
    """Input groups of an interrupted run that were prepared again, because their input had changed."""
    changed_input: str | None = None
    content_hash: str
    """32 hexadecimal digits; empty while incomplete."""
    unknown_share: float | None = None
    """[UNK] per token, measured on at most 2^24 evenly spaced tokens; `None` while incomplete."""
    tokens_per_word: float | None = None
    """Fertility; `None` while incomplete, or if the tokenizer does not mark words."""
    packings: dict[str, dict[int, Contents]] = field(default_factory=dict)
    """Contents of rows of 128 and 512 tokens for each packing; counted for a new corpus, with `progress`."""

    @classmethod
    def of(cls, out: str, fields: dict[str, Any]) -> PrepareReport:
        """Returns the report of the engine's counts."""
        if repeats := fields["repeats"]:
            documents, lines, most_repeated, error = repeats
            fields["repeats"] = Repeats(RepeatCount(*documents), RepeatCount(*lines), tuple(most_repeated), error)
        return cls(out=out, **fields)

    def lines(self) -> Iterator[str]:
        counts = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens"
        if self.unknown_share is not None:
            counts += f", {self.unknown_share:.2%} [UNK]"
        if self.tokens_per_word is not None:
            counts += f", {self.tokens_per_word:.2f} tokens per word"
        if self.already_complete:
            yield f"{self.out}: already complete: {counts}"
            return
        if self.unhashed_input_groups:
            counted = f"{self.unhashed_input_groups} of {self.num_input_groups} input groups are not"
            yield f"{self.out}: hashed, but {counted}; run it again when all partitions have been hashed"
            return
        if not self.complete:
            missing = f"{self.missing_input_groups} of {self.num_input_groups} input groups are still missing"
            remedy = (
                "when all partitions are done, copy their files into one folder and run prepare without --partition"
            )
            if _data.url_of(self.out):
                remedy = "the last partition completes the corpus"
            yield f"{self.out}: {counts} so far; {missing}: {remedy}"
            return
        empty = f", {self.empty_documents:,} empty ones skipped" if self.empty_documents else ""
        dropped = ", ".join(
            f"{count:,} {outcome}"
            for count, outcome in (
                (self.dropped_documents, "duplicate documents dropped"),
                (self.dropped_lines, "duplicate lines dropped"),
                (self.emptied_documents, "documents without other lines dropped"),
            )
            if count
        )
        validation = f", {self.holdout_documents:,} documents in the validation set" if self.holdout_documents else ""
        yield f"{self.out}: {counts}{empty}{validation}"
        if dropped:
            yield f"  {dropped}"
        yield from _repeat_lines(self.repeats)
        for packing, lengths in self.packings.items():
            summaries = (_summary(rows, length, self.num_tokens) for length, rows in lengths.items())
            yield f"  packing {packing}: {'; '.join(summaries)}"


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary(Result):
    """The outcome of `vocab`."""

    out: str
    """The file of the vocabulary, or the folder of a trimmed tokenizer."""
    num_entries: int
    """The requested size, or fewer if the text does not yield as many."""
    skipped_files: int
    """Files of other kinds, in folders or matched by globs, that were skipped."""
    skipped_rows: int
    """JSON records that could not be read and were skipped."""
    trimmed_from: int | None = None
    """The number of entries before `trim`."""
    unknown_share: float | None = None
    """With `trim`: [UNK] per token of the text, before and after."""
    split_share: float | None = None
    """With `trim`: the fraction of the text's tokens whose entries were dropped because of `size`."""

    def lines(self) -> Iterator[str]:
        if self.trimmed_from is None:
            yield f"{self.out}: {self.num_entries:,} entries"
            return
        split = f", {self.split_share:.2%} of them split by size" if self.split_share else ""
        entries = f"{self.out}: {self.num_entries:,} of {self.trimmed_from:,} entries"
        yield f"{entries}; {self.unknown_share:.2%} of the text's tokens are [UNK]{split}"
        yield f"turn the model into a run with this vocabulary: electra-fast import MODEL --vocab {self.out} --out RUN"


@dataclass(frozen=True)
class Contents:
    """Contents of the rows of one epoch: tokens without special ones, and the fraction of positions not padding."""

    rows: int
    tokens: int
    fill: float


def contents(corpora: Corpora, packing: str, sequence_length: int, *, seed: int = 0, cut_at: str = "token") -> Contents:
    """Counts the contents of the first epoch's rows; reads no tokens, except for cuts at words."""
    options = {"sequence_length": sequence_length, "seed": seed, "packing": packing, "cut_at": cut_at}
    loader = _data.BatchLoader(weighted_folders(corpora), options)
    rows, tokens, positions = loader.contents()
    return Contents(rows, tokens, positions / max(1, rows * sequence_length))


def examples_drop(corpora: Corpora, num_tokens: int, sequence_length: int, *, seed: int) -> str:
    """A line with the number of tokens that packing `examples` drops in the first epoch, and the key to keep them."""
    dropped = num_tokens - contents(corpora, "examples", sequence_length, seed=seed).tokens
    return (
        f'data.packing = "examples" drops {dropped:,} of {num_tokens:,} tokens '
        f"({dropped / max(1, num_tokens):.1%}) in rows of {sequence_length}; --data.packing best-fit keeps them all"
    )


def notes(report: PrepareReport) -> Iterator[str]:
    """Yields notes about inputs that were not read."""
    if report.skipped_files:
        yield f"skipped {report.skipped_files} files with unknown extensions"
    if splits := ", ".join(report.skipped_splits):
        yield f"only split train of saved datasets was read, not {splits}; pass their folders to read them"


def guess(tokenizer: Tokenizer) -> str:
    accents = "dropped" if tokenizer.options["strip_accents"] else "kept"
    casing = "cased" if tokenizer.options["cased"] else f"uncased (text is lowercased, accents are {accents})"
    return f"{tokenizer.path}: assumed {casing} from its entries; pass --cased or --uncased to override"


def words_counted(
    seed: int,
    num_words: int,
    num_bytes: tuple[int, int],
    letters: tuple[int, int, int, int],
    words: tuple[int, int],
    most: str,
) -> Iterator[str]:
    """Yields the notes of `vocab` about its counts: the sample, the dropped characters, and their cost."""
    counted, total = num_bytes
    if counted < total:
        share = f"{counted / 1e9:.2g} of {total / 1e9:.2g} GB"
        yield f"counted words in {share} of text (seed {seed}); sample=0 (--sample 0) counts all text"
    covered, dropped, occurrences, in_text = letters
    line = f"characters: all {covered:,} of the words counted"
    if dropped:
        lost, occurring = words
        more = " …" if dropped > len(most) else ""
        line = (
            f"characters: {covered:,} of the {covered + dropped:,} in the words counted; the others "
            f"({' '.join(most)}{more}) are {occurrences / in_text:.3%} of the text and make {lost / occurring:.3%} of "
            "the words [UNK] (--character-coverage closer to 1 keeps more)"
        )
    yield line
    yield f"merging the pieces of {num_words:,} words into a vocabulary"


def _repeat_lines(repeats: Repeats | None) -> Iterator[str]:
    if repeats is None or not repeats.lines.repeated:
        return
    yield f"  repeated in the input: documents {repeats.documents}, lines {repeats.lines}"
    if repeats.most_repeated:
        error = f"{repeats.most_repeated_error:,}"
        bound = f"; each may occur {error} times more" if repeats.lines.sampled > 1 else ""
        yield f"  the most repeated lines (an unlisted line occurs at most {error} times{bound}):"
        for text, count in repeats.most_repeated:
            yield f"    {count:,} × {printable(text if len(text) <= SHOWN else text[:SHOWN] + '…')}"


def _summary(rows: Contents, length: int, num_tokens: int) -> str:
    dropped = num_tokens - rows.tokens
    share = f" ({dropped / max(1, num_tokens):.1%})" if dropped else ""
    return f"in rows of {length} keeps {rows.tokens:,} tokens and drops {dropped:,}{share}, fill {rows.fill:.1%}"


def packings_of(corpus: str) -> dict[str, dict[int, Contents]]:
    """Counts the contents of rows of the published lengths for each packing: seconds for a large corpus."""
    return {packing: {length: contents(corpus, packing, length) for length in LENGTHS} for packing in _data.PACKINGS}

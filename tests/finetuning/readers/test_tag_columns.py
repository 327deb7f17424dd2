"""Files with a word per line: comments, named and numbered columns, tables, and what tells them from texts."""

import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows
from electra_fast.finetuning.readers.tag_columns import column_sentences
from electra_fast.finetuning.readers.tag_files import iterate_tagging, read_tagging

WORDS = [["Frau", "Kim", "in", "Köln"], ["Kim", "#ai", "."]]
TAGS = [["O", "B-PER", "O", "B-LOC"], ["B-PER", "O", "O"]]


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="train.conll"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write_file


def lines_of(comment, columns, separator="\t"):
    """The sentences of `WORDS`, each after a comment; `columns` are of a word's number, word and tag."""
    blocks = []
    for words, tags in zip(WORDS, TAGS, strict=True):
        rows = (columns(str(number), *pair) for number, pair in enumerate(zip(words, tags, strict=True), 1))
        blocks.append(comment + "".join(separator.join(row) + "\n" for row in rows))
    return "\n".join(blocks)


def read(path, text=(), label=(), **options):
    sentences = list(column_sentences(path, text, label, **options))
    return [[s.text[a:b] for a, b in s.words] for s in sentences], [s.tags for s in sentences]


def two(_, word, tag):
    return word, tag


def four(_, word, tag):
    return word, "_", "_", tag


def germeval(number, word, tag):
    return number, word, tag, "O"


@pytest.mark.parametrize("suffix", ["conll", "iob", "txt", "tsv"])
@pytest.mark.parametrize("separator", ["\t", " "])
@pytest.mark.parametrize("columns", [two, four])
@pytest.mark.parametrize(
    "comment",
    ["# doc=1\n", "# id 7f domain=de\n", "# id 7f\tdomain=de\n", "#\tn-tv.de\t[2005-02-26]\t\n", "# a\n# b c\n"],
)
def test_comments_are_not_words(write, suffix, separator, columns, comment):
    path = write(lines_of(comment, columns, separator), f"train.{suffix}")
    notes = []
    assert read(path, notes=notes) == (WORDS, TAGS)
    first = comment.splitlines()[0].strip()
    number = 2 * comment.count("\n")
    assert notes == [f"{path}: line 1: {first!r} is the first of {number} lines that are read as comments"]
    assert [len(words) for _, words in iterate_tagging(path)] == [4, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# O\nA B-X\n", ["#", "A"]),
        ("A B-X\n# I-X\n", ["A", "#"]),
        ("# #\nA NN\n", ["#", "A"]),
        ("#ai HASHTAG\nA NN\n# NN\n", ["#ai", "A", "#"]),
        ("# x\nA O\n# y z\n# y\nB O\n", ["A", "B"]),
        ("#begin document (a/b); part 000\nA PER\nB O\n#end document\n", ["A", "B"]),
        ("#\n#ai\nA\n", ["#", "#ai", "A"]),
    ],
)
def test_words_that_begin_like_comments(write, content, words):
    label = None if " " not in content else ()
    assert read(write(content), label=label)[0] == [words]


def test_columns_that_number_the_words(write):
    path = write(lines_of("#\thttp://example.org\t[2010-07-04]\t\n", germeval), "train.tsv")
    notes = []
    assert read(path, notes=notes) == read(path, ("1",), ("2",)) == (WORDS, TAGS)
    assert notes[0].startswith(f"{path}: column 0 numbers the words; words are read from column 1, tags from column 2")
    assert [words is not None for _, words in iterate_tagging(path)] == [True, True]


@pytest.mark.parametrize("suffix", ["conllup", "conllu", "txt"])
def test_named_columns(write, suffix):
    header = "# global.columns = ID FORM UPOS EXTRA:NE\n# newdoc\n"
    path = write(header + "1-2\tdel\t_\t_\n" + lines_of("# x\n", lambda *row: (*row[:2], "X", row[2])), f"a.{suffix}")
    assert read(path) == (WORDS, TAGS)
    assert read(path, ("form",), ("UPOS",))[1] == [["X"] * 4, ["X"] * 3]
    with pytest.raises(InputError, match="no column 'LEMMA'; there are: ID, FORM, UPOS, EXTRA:NE; choose with --label"):
        read(path, label=("LEMMA",))


def test_columns_of_conllup_that_are_ambiguous(write):
    path = write("# global.columns = ID FORM A B\n1\ta\tO\tO\n", "a.conllup")
    with pytest.raises(InputError, match="no label column; there are: A, B; choose with --label"):
        read(path)


@pytest.mark.parametrize("ids", [("1", "2", "1"), ("1", "3"), ("2", "3")])
def test_words_that_are_misnumbered(write, ids):
    content = "".join(f"{number}\ta\t_\tX\n" for number in ids)
    with pytest.raises(InputError, match="the word is numbered '.' and should be .; a line is missing, or a blank"):
        read(write(content, "a.conllu"))


KAGGLE = "Sentence #,Word,POS,Tag\nSentence: 1,Frau,X,O\n{0},Kim,X,B-PER\n{0},in,X,O\n{0},Köln,X,B-LOC\n"
KAGGLE += 'Sentence: 2,Kim,X,B-PER\n{1},#ai,X,O\n{1},"." ,X,O\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", KAGGLE.format("", "").replace('"." ', ".")),
        ("a.csv", KAGGLE.format("Sentence: 1", "Sentence: 2").replace('"." ', '"."')),
        ("a.tsv", KAGGLE.format("", "").replace('"." ', ".").replace(",", "\t")),
        ("a.conll", "token\tner\n" + lines_of("", two)),
        ("a.conll", "# made by hand\ntoken\tner\n" + lines_of("", two)),
        ("a.txt", "word label\n" + lines_of("", two, " ")),
    ],
)
def test_tables_of_words(write, name, content):
    path = write(content, name)
    assert read(path) == (WORDS, TAGS)
    assert [len(words) for _, words in iterate_tagging(path)] == [4, 3]


def test_quotes_in_tables_of_words(write):
    path = write('sent,word,tag\n1,Ann,B-X\n1,",O\n2,",O\n', "a.csv")
    assert read(path, quoting="none") == ([["Ann", '"'], ['"']], [["B-X", "O"], ["O"]])
    assert read_tagging(path, path, None, quoting="none").task.labels == ("O", "B-X", "I-X")
    assert [text for text, _ in iterate_tagging(path, quoting="none")] == ['Ann "', '"']


def test_tables_without_usual_names(write):
    path = write("sent_id,w,t\n1,a,O\n1,b,B-X\n2,c,O\n", "a.csv")
    assert read(path, ("w",), ("t",)) == ([["a", "b"], ["c"]], [["O", "B-X"], ["O"]])
    assert [text for text, _ in iterate_tagging(path, text=("w",))] == ["a b", "c"]
    with pytest.raises(InputError, match="no text column; there are: sent_id, w, t; choose with --text"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "New York\nIs O\n"),
        ("a.txt", "Ann met Bob\nBob ran\n"),
        ("a.tsv", "id\ttext\tlabel\n" + "1\tAda met\tO\n" * 20),
        ("a.csv", "id,sentence\n1,Ada met\n"),
    ],
)
def test_texts_are_not_taken_for_columns(write, name, content):
    assert {words for _, words in iterate_tagging(write(content, name))} == {None}


def test_numbers_are_not_taken_for_words(write):
    with pytest.raises(InputError, match="line 1: column 0 has only numbers; choose the words with --text"):
        read(write("7 Ann B-X\n8 is O\n\n9 Bob B-X\n"))
    path = write("Ann\tB-X\t\nis\tO\t\n")
    assert read(path)[1] == [["B-X", "O"]]  # a tab may end a line


def test_a_file_without_blank_lines_is_asked_about(write):
    path = write("a O\n" * 399 + "b B-X\n")
    with pytest.raises(InputError, match="a single sentence of 400 words; put a blank line after each sentence, or"):
        read_tagging(path, path, None)
    train = write("a O\nb B-X\n\n" * 2 + path.read_text(), "other.conll")
    assert any(
        "line 7: the first of 1 sentences of 400 words" in note for note in read_tagging(train, None, path).notes
    )


def test_bad_sentences_are_listed_and_can_be_left_out(write):
    path = write("a O\nb B-X\n\nc O\nd\n\ne O\n\nf Y\n\ng O\nh B-X\n\ni\n")
    with pytest.raises(InputError) as caught:
        read_tagging(path, None, None)
    assert str(caught.value).startswith("3 bad rows:") and "\n" not in str(caught.value)
    assert all(f"{path}: line {line}: " in str(caught.value) for line in (5, 9, 14))
    data = read_tagging(path, None, None, skip_bad_rows=3)
    assert sorted(text for split in (data.train, *data.dev) for (text,) in split.texts) == ["a b", "e", "g h"]
    assert any(note.startswith("3 bad rows are left out:") for note in data.notes)
    bad = BadRows(9)
    assert len(list(column_sentences(path, bad=bad))) == 4 and bad.number == 2

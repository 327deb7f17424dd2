"""Files with a word per line: comments, named and numbered columns, tables, and what tells them from texts."""

import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows
from electra_fast.finetuning.readers.tag_columns import SENTENCE_NAMES, column_sentences
from electra_fast.finetuning.readers.tag_files import iterate_tagging, read_tagging

WORDS = [["Frau", "Kim", "in", "Köln"], ["Kim", "#ai", "."]]
TAGS = [["O", "B-PER", "O", "B-LOC"], ["B-PER", "O", "O"]]


def lines_of(comment, columns, separator="\t"):
    """The sentences of `WORDS`, each after a comment; `columns` are of a word's number, word and tag."""
    blocks = []
    for words, tags in zip(WORDS, TAGS, strict=True):
        rows = (columns(str(number), *pair) for number, pair in enumerate(zip(words, tags, strict=True), 1))
        blocks.append(comment + "".join(separator.join(row) + "\n" for row in rows))
    return "\n".join(blocks)


def read(path, text=(), label=(), **options):
    """The words and the tags of each sentence."""
    sentences = list(column_sentences(path, text, label, **options))
    return [[s.text[a:b] for a, b in s.words] for s in sentences], [s.tags for s in sentences]


def message_of(path, *args, **options):
    with pytest.raises(InputError) as caught:
        read(path, *args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def two(_, word, tag):
    return word, tag


def four(_, word, tag):
    return word, "_", "_", tag


def germeval(number, word, tag):
    return number, word, tag, "O"


@pytest.mark.parametrize("suffix", ["conll", "txt", "tsv"])
@pytest.mark.parametrize("columns", [two, four])
@pytest.mark.parametrize(
    "comment", ["# id 7f domain=de\n", "# id 7f\tdomain=de\n", "#\tn-tv.de\t[2005-02]\t\n", "# a\n# b c\n"]
)
def test_comments_are_not_words(write, suffix, columns, comment):
    for separator in "\t ":
        path = write(lines_of(comment, columns, separator), f"train.{suffix}")
        notes = []
        assert read(path, notes=notes) == (WORDS, TAGS)
        first = f"{comment.splitlines()[0].strip()!r} is the first of {2 * comment.count(chr(10))} lines"
        assert notes == [f"{path}: line 1: {first} that are read as comments"]
        assert [len(words) for _, words in iterate_tagging(path)] == [4, 3]


def test_what_columns_may_hold(write):
    lines = ["\ufeff-DOCSTART- -X- O O", "", "#tag x O", "a\u00a0b\u3000 y B-X", " ", "-DOCSTART- -X- O", "(\rx z I-X"]
    path = write("\r\n".join([*lines, "", "", ""]))
    assert read(path) == ([["#tag", "a\u00a0b\u3000"], ["(\rx"]], [["O", "B-X"], ["I-X"]])
    assert [sentence.lines for sentence in column_sentences(path)] == [[3, 4], [7]]
    path = write("New York\tB-X\nis \t O\n\t\nx\tO")
    assert read(path) == ([["New York", "is"], ["x"]], [["B-X", "O"], ["O"]])
    assert read(write("Ann\tB-X\t\nis\tO\t\n"))[1] == [["B-X", "O"]]  # a tab may end a line


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
    """As in GermEval, whose outer entities come first."""
    content = lines_of("#\thttp://example.org\t[2010-07-04]\t\n", lambda *row: (*row, "O"))
    path = write(content, "train.tsv")
    notes = []
    assert read(path, notes=notes) == read(path, ("1",), ("2",)) == (WORDS, TAGS)
    assert notes[0].startswith(f"{path}: column 0 numbers the words; words are read from column 1, tags from column 2")
    assert [words is not None for _, words in iterate_tagging(path)] == [True, True]


def test_conllu(write):
    lines = ["1-2 vámonos _ _", "1 vamos ir VERB", "2 nos yo PRON", "2.1 x x X", "3 no no ADV"]
    sentence = "\n".join(["# text = vámonos no", *(line.replace(" ", "\t") for line in lines), ""])
    path = write(sentence + "\n" + sentence, "train.conllu")
    assert read(path) == ([["vamos", "nos", "no"]] * 2, [["VERB", "PRON", "ADV"]] * 2)
    assert read(path, ("2",), ("-3",)) == ([["ir", "yo", "no"]] * 2, [["vamos", "nos", "no"]] * 2)


@pytest.mark.parametrize("suffix", ["conllup", "txt"])
def test_named_columns(write, suffix):
    header = "# global.columns = ID FORM UPOS EXTRA:NE\n# newdoc\n"
    path = write(header + "1-2\tdel\t_\t_\n" + lines_of("# x\n", lambda *row: (*row[:2], "X", row[2])), f"a.{suffix}")
    assert read(path) == (WORDS, TAGS)
    assert read(path, ("form",), ("UPOS",))[1] == [["X"] * 4, ["X"] * 3]
    message = "no column 'LEMMA'; there are: ID, FORM, UPOS, EXTRA:NE; choose with --label"
    assert message_of(path, label=("LEMMA",)) == message


def test_chosen_columns(write):
    path = write("1 B-X a\n2 O b\n")
    assert read(path, ("-1",), ("1",)) == ([["a", "b"]], [["B-X", "O"]])
    assert read(path, ("1",), None) == ([["B-X", "O"]], [None])


@pytest.mark.parametrize("label", ["-1", "1", "3"])
def test_test_files_may_lack_the_column_of_tags(write, label):
    assert read(write("a\nb\n\nc d\n"), (), (label,), is_test=True) == ([["a", "b"], ["c"]], [None, None])
    assert message_of(write("a O b O\n\nb\n"), (), (label,), is_test=True).startswith("line 3: 1 column separated")


MISFIT = "columns separated by tabs or spaces, but words are expected in column"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\nb B-X\nc\n", "line 3: 1 columns, but line 1 of the sentence has 2; every word needs a tag"),
        ("a\tO\n\tO\n", "line 2: word 2 is empty; remove it and its tag"),
        (b"a O\nb \xff\n", "line 2: not UTF-8 at byte 6; convert the file to UTF-8"),
        ("7 Ann B-X\n8 is O\n\n9 Bob B-X\n", "line 1: column 0 has only numbers; choose the words with --text"),
        ("# global.columns = ID FORM A B\n1\ta\tO\tO\n", "no label column; there are: A, B; choose with --label"),
    ],
)
def test_columns_that_cannot_be_used(write, content, message):
    assert message_of(write(content)).startswith(message)


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        (("word",), (), "--text is 'word'; the columns of this format are numbered from 0, and from the end with -1"),
        ((), ("tag",), "--label is 'tag'; the columns of this format"),
        (("0", "1"), (), "--text names 2 columns (0, 1); tagging reads one"),
        (("2",), (), f"line 1: 2 {MISFIT} 2 and tags in column -1; choose with --text and --label"),
        ((), ("-3",), f"line 1: 2 {MISFIT} 0 and tags in column -3"),
        ((), ("0",), f"line 1: 2 {MISFIT} 0 and tags in column 0"),
        (("2",), None, f"line 1: 2 {MISFIT} 2; choose"),
    ],
)
def test_column_numbers_that_cannot_be_used(write, text, label, message):
    assert message_of(write("a O\nb B-X\n"), text, label).startswith(message)


@pytest.mark.parametrize(("ids", "line"), [("121", 3), ("13", 2), ("23", 1)])
def test_words_that_are_misnumbered(write, ids, line):
    content = "".join(f"{number}\ta\t_\tX\n" for number in ids)
    expected = (
        f"line {line}: the word is numbered {ids[line - 1]!r} and should be {line}; a line is missing, or a blank"
    )
    assert message_of(write(content, "a.conllu")).startswith(expected)


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
    assert message_of(path) == "no text column; there are: sent_id, w, t; choose with --text"


@pytest.mark.parametrize("name", ["sentiment", "sentences_total", "sent_at", "Sentence #", "SENT", "sentence_id"])
def test_sentences_are_numbered_by_exact_names(write, name):
    path, notes = write(f"word,tag,{name}\na,O,1\nb,B-X,2\n\nc,O,2\n", "a.csv"), []
    numbers = name.lower() in SENTENCE_NAMES
    words = [["a"], ["b"], ["c"]] if numbers else [["a", "b"], ["c"]]
    assert read(path, notes=notes)[0] == words
    assert [text.split() for text, _ in iterate_tagging(path)] == words
    by = f", sentences by {name!r}" if numbers else ""
    assert notes == [f"{path}: words in 'word', tags in 'tag'{by}; choose columns with --text and --label"]


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
    with pytest.raises(InputError, match="3 bad rows:") as caught:
        read_tagging(path, None, None)
    assert all(f"{path}: line {line}: " in str(caught.value) for line in (5, 9, 14))
    data = read_tagging(path, None, None, skip_bad_rows=3)
    assert sorted(text for split in (data.train, *data.dev) for (text,) in split.texts) == ["a b", "e", "g h"]
    assert any(note.startswith("3 bad rows are left out:") for note in data.notes)
    bad = BadRows(9)
    assert len(list(column_sentences(path, bad=bad))) == 4 and bad.number == 2

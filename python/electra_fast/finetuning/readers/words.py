"""Words of a text in any script, and detection of texts without spaces between words, such as Chinese and Thai."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]
"""Start and end (exclusive) of each word of a text, in characters: [words, 2]."""
# Thai, Lao, Tibetan, Myanmar, Khmer, Han, Hiragana, Katakana and Bopomofo.
UNSPACED = (
    "\u0e00-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u3100-\u312f"
    "\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_UNSPACED_CHARACTER = re.compile(f"[{UNSPACED}]")
# Minimum fraction of a text's letters. English articles about China are below it, Chinese ones about software above.
_MIN_UNSPACED = 0.2
# Letters of scripts without spaces between words: Thai to Tibetan, Myanmar, Khmer, kana, and Chinese as in BERT's basic
# tokenizer.
_UNSPACED_LETTER = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\ua9e0-\ua9ff\uaa60-\uaa7f\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
# A word, in the letters of `_CharacterClasses`.
_WORD = re.compile(r"c[mj]*|[wmj]+|rr?[mj]*|[xt](?:j[xt]|[mjt])*")


def is_unspaced(text: str) -> bool:
    num_letters = sum(map(str.isalpha, text))
    return len(_UNSPACED_CHARACTER.findall(text)) > _MIN_UNSPACED * num_letters


def words_of_text(text: str) -> Words:
    """Returns the start and end (exclusive) of each word of a text in characters, [words, 2].

    A word is a run of letters, digits, marks and `_`, or a single other character that is not a space. In scripts
    without spaces, such as Chinese, Japanese and Thai, each letter is a word. Marks and invisible characters belong to
    the preceding character; an emoji sequence is one word.
    """
    spans = [match.span() for match in _WORD.finditer(text.translate(_CLASSES))]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


class _CharacterClasses(dict[int, str]):
    """Maps code points to the character classes of `_WORD`; filled on first use.

    c: letter of a script without spaces, w: other letter or digit, m: mark or invisible, j: zero-width joiner, r: half
    of a flag, t: skin tone, x: other.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if character.isspace():
            letter = " "
        elif category[0] == "M" or category == "Cf":
            letter = "j" if character == "\u200d" else "m"
        elif character.isalnum() or character == "_":
            letter = "c" if _UNSPACED_LETTER.match(character) else "w"
        elif "\U0001f1e6" <= character <= "\U0001f1ff":
            letter = "r"
        else:
            letter = "t" if "\U0001f3fb" <= character <= "\U0001f3ff" else "x"
        return self.setdefault(code, letter)


_CLASSES = _CharacterClasses()


def places_of(words: Sequence[str]) -> Words:
    """Returns the start and end of each word in the text of all words joined by single spaces."""
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    ends = np.cumsum(lengths + 1) - 1
    return np.stack((ends - lengths, ends), axis=1)

//! Encoding with offsets gives the ids of `encode_batch` for any text and options, and places within the text.

mod strings;

use electra_data::{Pieces, Tokenizer};
use strings::{Numbers, random_string, tokenizers};

fn assert_in_order(name: &str, text: &str, pieces: &Pieces) {
    assert_eq!((pieces.offsets.len(), pieces.words.len()), (pieces.ids.len(), pieces.ids.len()));
    let length = text.chars().count() as u32;
    assert!(pieces.offsets.iter().all(|&[start, end]| start <= end && end <= length), "{name}: {text:?}");
    assert!(pieces.offsets.is_sorted_by_key(|&[start, _]| start), "{name}: {text:?}");
    assert!(pieces.words.is_sorted(), "{name}: {text:?}");
}

fn assert_same(name: &str, tokenizer: &Tokenizer, texts: &[String]) {
    let expected = tokenizer.encode_batch(texts).expect("ids");
    let found = tokenizer.encode_batch_with_offsets(texts).expect("pieces");
    assert_eq!(found.len(), texts.len());
    for ((text, pieces), ids) in texts.iter().zip(&found).zip(expected) {
        assert_eq!(pieces.ids, ids, "{name}: {text:?}");
        assert_in_order(name, text, pieces);
    }
}

#[test]
fn random_strings() {
    let mut numbers = Numbers(20_270_314);
    for (name, tokenizer) in tokenizers(None, tempfile::tempdir().expect("a temporary folder").path()) {
        let texts: Vec<String> = (0..500).map(|_| random_string(&mut numbers)).collect();
        assert_same(&name, &tokenizer, &texts);
    }
}

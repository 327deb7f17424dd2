//! Pages of lists, which the crate `object_store` takes as they come: an answer that is no list or ends in its middle
//! would be one without objects, and a single key that the crate refuses would make all others unreadable.

use object_store::path::Path;
use url::form_urlencoded;

/// Begins what stands for a key that cannot be requested.
pub(super) const UNREADABLE: &str = "\u{fffd}unreadable ";
/// The longest part of an answer that an error keeps.
const SHOWN: usize = 1000;

/// The elements of a page: the whole, an object, its key, the next page, and that page in a request.
type Names = [&'static str; 5];
const S3: Names = ["ListBucketResult", "Contents", "Key", "NextContinuationToken", "continuation-token"];
const AZURE: Names = ["EnumerationResults", "Blob", "Name", "NextMarker", "marker"];

/// Whether a request with this query asks for a page of a list.
pub(super) fn is_asked_for(query: &str) -> bool {
    query.split('&').any(|pair| pair == "list-type=2" || pair == "comp=list")
}

/// A complete page, with a name that can be shown in place of each key that cannot be requested. Objects by which
/// consoles mark folders are left out.
pub(super) fn readable(query: &str, page: &str) -> Result<String, String> {
    let is_whole = |names: &Names| page.trim_end().ends_with(&format!("</{}>", names[0]));
    let Some([_, object, key, next, asked]) = [S3, AZURE].into_iter().find(is_whole) else {
        return Err(format!("the answer is no list: {}", page.chars().take(SHOWN).collect::<String>()));
    };
    let next = between(page, &format!("<{next}>"), &format!("</{next}>")).unwrap_or_default();
    let is_truncated = page.contains("<IsTruncated>true</IsTruncated>");
    let known = form_urlencoded::parse(query.as_bytes()).any(|(name, token)| name == asked && token == next);
    if is_truncated && next.is_empty() || known && !next.is_empty() {
        return Err("the list ends in its middle: the answer names no next page".to_owned());
    }
    let (start, end) = (format!("<{object}>"), format!("</{object}>"));
    let mut objects = page.split(&start);
    let mut whole = objects.next().unwrap_or_default().to_owned();
    for rest in objects {
        let (inner, rest) = rest.split_once(&end).unwrap_or((rest, ""));
        if let Some(inner) = object_with_name(inner, key) {
            whole += &format!("{start}{inner}{end}");
        }
        whole += rest;
    }
    Ok(whole)
}

/// An object's element, with another name if its own cannot be requested; `None` for the mark of a folder.
fn object_with_name(inner: &str, key: &str) -> Option<String> {
    let Some(text) = between(inner, &format!("<{key}"), &format!("</{key}>")) else {
        return Some(inner.to_owned()); // the crate rejects it
    };
    let (attributes, name) = text.split_once('>').unwrap_or(("", text));
    let plain = resolved(name);
    let is_empty = ["<Size>0<", "<Content-Length>0<"].iter().any(|size| inner.contains(size));
    if plain.ends_with('/') && is_empty {
        return None;
    }
    let is_known = attributes.is_empty() && !plain.contains(char::REPLACEMENT_CHARACTER);
    if is_known && Path::parse(&plain).is_ok_and(|path| path.as_ref() == plain) {
        return Some(inner.to_owned());
    }
    let shown: String = plain
        .chars()
        .map(|c| if c == '/' || c.is_control() { format!("%{:02X}", u32::from(c)) } else { c.to_string() })
        .collect();
    Some(inner.replace(&format!("<{key}{text}<"), &format!("<{key}>{UNREADABLE}{shown}<")))
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

/// A text with the characters that XML writes as numbers.
fn resolved(text: &str) -> String {
    let mut pieces = text.split("&#");
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let resolved = piece.split_once(';').and_then(|(number, rest)| {
            let hex = number.strip_prefix('x').map(|digits| u32::from_str_radix(digits, 16));
            let number = hex.unwrap_or_else(|| number.parse()).ok().and_then(char::from_u32)?;
            Some(format!("{number}{rest}"))
        });
        plain += &resolved.unwrap_or_else(|| format!("&#{piece}"));
    }
    plain
}

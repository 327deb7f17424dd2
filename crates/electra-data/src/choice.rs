//! Options by name: enumerations with named values, and options read from a map.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// An option with a fixed set of named values.
pub trait Choice: Copy + PartialEq + 'static {
    const NAMES: &'static [(&'static str, Self)];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, value)| *value == self).map_or("", |(name, _)| name)
    }
}

/// Names the values of an enumeration. They are serialized by name.
macro_rules! choice {
    ($type:ty { $($name:literal => $value:ident),+ }) => {
        impl $crate::choice::Choice for $type {
            const NAMES: &'static [(&'static str, Self)] = &[$(($name, Self::$value)),+];
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
                to.serialize_str($crate::choice::Choice::name(*self))
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
                $crate::choice::by_name(from)
            }
        }
    };
}
pub(crate) use choice;

pub(crate) fn by_name<'de, D: Deserializer<'de>, C: Choice>(from: D) -> std::result::Result<C, D::Error> {
    let name = String::deserialize(from)?;
    C::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, value)| value).ok_or_else(|| {
        let mut names: Vec<String> = C::NAMES.iter().map(|(name, _)| format!("{name:?}")).collect();
        let last = names.pop().unwrap_or_default();
        D::Error::custom(format!("must be {} or {last}", names.join(", ")))
    })
}

/// Reads options by name; missing options have their defaults. An error names the option, its value and the cause.
pub fn options_from<T: DeserializeOwned>(values: Map<String, Value>) -> Result<T> {
    for (name, value) in &values {
        let alone = Value::from(Map::from_iter([(name.clone(), value.clone())]));
        serde_json::from_value::<T>(alone)
            .map_err(|error| Error::Input(format!("{name} = {value}: {error}")))?;
    }
    serde_json::from_value(values.into()).map_err(|error| Error::Input(error.to_string()))
}

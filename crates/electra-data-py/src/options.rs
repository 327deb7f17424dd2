//! Options from Python's dictionaries.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};

use crate::errors::{InputError, raise};

/// Options by name; those that are not given have their defaults.
pub(crate) fn options<T: DeserializeOwned>(given: Option<&Bound<PyDict>>) -> PyResult<T> {
    let mut values = Map::new();
    for (name, value) in given.into_iter().flat_map(|given| given.iter()) {
        let name = name.extract::<String>()?;
        let value = json(&name, &value)?;
        values.insert(name, value);
    }
    electra_data::options_from(values).map_err(raise)
}

/// The value of an option: an integer, a number, text, a list of texts or nothing.
fn json(name: &str, value: &Bound<PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(integer) = value.extract::<i64>() {
        return Ok(integer.into());
    }
    if let Ok(number) = value.extract::<f64>() {
        let number = Number::from_f64(number)
            .ok_or_else(|| InputError::new_err(format!("{name} = {number}: not a finite number")))?;
        return Ok(number.into());
    }
    match value.extract::<String>() {
        Ok(text) => Ok(text.into()),
        Err(_) => value.extract::<Vec<String>>().map(Value::from),
    }
}

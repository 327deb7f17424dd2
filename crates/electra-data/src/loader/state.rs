//! The state from which a loader resumes.

use serde::{Deserialize, Serialize};

use super::mixture::Mixture;
use super::options::LoaderOptions;
use super::shuffle_window::{CorpusPosition, RowPosition};
use crate::error::{Error, Result};

/// Upper bound on a loader's rows, so that products with weights fit into 128 bits.
const MAX_TURNS: u64 = 1 << 48;

/// The position of a loader, with the identity of its corpora and options: everything needed to resume. As JSON, less
/// than 256 bytes for one corpus, and about 110 per corpus of a mixture; with several lanes, about 20 per corpus and
/// lane. A rank knows only the positions of its lanes: `merged` combines the states of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "Saved")]
pub struct LoaderState(Several<LanesOfMember>);

#[derive(Serialize)]
#[serde(untagged)]
enum Saved {
    Single(Single),
    Mixture(Several<Member>),
    Lanes(Several<LanesOfMember>),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Single {
    epoch: u32,
    #[serde(rename = "group")]
    window: u32,
    row: u64,
    seed: u64,
    corpus: String,
    options: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Several<M> {
    corpora: Vec<M>,
    seed: u64,
    options: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Member {
    corpus: String,
    weight: u64,
    epoch: u32,
    #[serde(rename = "group")]
    window: u32,
    row: u64,
    turns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LanesOfMember {
    corpus: String,
    weight: u64,
    /// Epoch, window, row and turns of each lane; `None` for a lane of another rank.
    lanes: Vec<Option<(u32, u32, u64, u64)>>,
}

impl From<LoaderState> for Saved {
    fn from(LoaderState(state): LoaderState) -> Self {
        let member = |LanesOfMember { corpus, weight, lanes }: &LanesOfMember| {
            let [Some((epoch, window, row, turns))] = lanes[..] else { return None };
            Some(Member { corpus: corpus.clone(), weight: *weight, epoch, window, row, turns })
        };
        let (seed, options) = (state.seed, state.options.clone());
        match state.corpora.iter().map(member).collect::<Option<Vec<_>>>() {
            None => Self::Lanes(state),
            Some(mut corpora) if corpora.len() == 1 => {
                let Member { corpus, epoch, window, row, .. } = corpora.remove(0);
                Self::Single(Single { epoch, window, row, seed, corpus, options })
            }
            Some(corpora) => Self::Mixture(Several { corpora, seed, options }),
        }
    }
}

impl From<Saved> for LoaderState {
    fn from(saved: Saved) -> Self {
        let (corpora, seed, options) = match saved {
            Saved::Lanes(state) => return Self(state),
            Saved::Mixture(Several { corpora, seed, options }) => (corpora, seed, options),
            Saved::Single(Single { epoch, window, row, seed, corpus, options }) => {
                (vec![Member { corpus, weight: 1, epoch, window, row, turns: 0 }], seed, options)
            }
        };
        let lanes = |Member { corpus, weight, epoch, window, row, turns }| LanesOfMember {
            corpus,
            weight,
            lanes: vec![Some((epoch, window, row, turns))],
        };
        Self(Several { corpora: corpora.into_iter().map(lanes).collect(), seed, options })
    }
}

impl LoaderState {
    pub(super) fn new(positions: &[Vec<CorpusPosition>], options: &LoaderOptions, mixture: &Mixture) -> Self {
        let is_single = options.lanes == 1 && mixture.corpora.len() == 1;
        let members = mixture.corpora.iter().zip(&mixture.weights).enumerate();
        let corpora = members.map(|(number, (blocks, &weight))| {
            let mut lanes = vec![None; options.lanes as usize];
            for (lane, positions) in options.lanes_of_rank().zip(positions) {
                let CorpusPosition { at, turns, .. } = positions[number];
                let turns = if is_single { 0 } else { turns };
                lanes[lane as usize] = Some((at.epoch, at.window, at.row, turns));
            }
            LanesOfMember { corpus: blocks.corpus.content_hash().into(), weight, lanes }
        });
        Self(Several { corpora: corpora.collect(), seed: options.seed as u64, options: options.content() })
    }

    /// The state of a loader whose ranks have these states; states of different batches are [`Error::Input`].
    pub fn merged(states: Vec<Self>) -> Result<Self> {
        let mut states = states.into_iter();
        let first = states.next().ok_or_else(|| Error::Input("no states to merge".into()))?;
        states.try_fold(first, |merged, state| match merged.union(&state) {
            Some(both) => Ok(both),
            None => Err(Error::Input(format!(
                "states of different loaders or batches cannot be merged: {} and {}",
                merged.to_json()?,
                state.to_json()?
            ))),
        })
    }

    /// This state with the lanes of another one, if they agree otherwise.
    fn union(&self, other: &Self) -> Option<Self> {
        let mut both = self.clone();
        for (member, other) in both.0.corpora.iter_mut().zip(&other.0.corpora) {
            for (lane, other) in member.lanes.iter_mut().zip(&other.lanes) {
                if lane.is_some() && other.is_some() && lane != other {
                    return None;
                }
                *lane = lane.or(*other);
            }
        }
        let without_positions = |state: &Self| {
            let mut state = state.clone();
            state.0.corpora.iter_mut().for_each(|member| member.lanes.fill(None));
            state
        };
        (without_positions(self) == without_positions(other)).then_some(both)
    }

    pub fn from_json(json: &str) -> Result<Self> {
        let parsed = serde_json::from_str::<serde_json::Value>(json).unwrap_or_default();
        let saved = if parsed["corpora"][0].get("lanes").is_some() {
            serde_json::from_str(json).map(Saved::Lanes)
        } else if parsed.get("corpora").is_some() {
            serde_json::from_str(json).map(Saved::Mixture)
        } else {
            serde_json::from_str(json).map(Saved::Single)
        };
        let failed = |error| Error::Input(format!("state: {error}; pass the unchanged result of state()"));
        saved.map(Self::from).map_err(failed)
    }

    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::Input(format!("state: {error}")))
    }

    /// The corpora's positions in each lane of the rank, if the state is of this mixture with these options.
    pub(super) fn positions(
        &self,
        options: &LoaderOptions,
        mixture: &Mixture,
    ) -> Result<Vec<Vec<CorpusPosition>>> {
        let start = vec![CorpusPosition::default(); mixture.corpora.len()];
        let current = Self::new(&vec![start; options.lanes_of_rank().len()], options, mixture);
        let hashes = |Self(state): &Self| joined(state.corpora.iter().map(|member| &member.corpus));
        let weights = |Self(state): &Self| match &state.corpora[..] {
            [_] => String::new(), // not needed for a single corpus
            several => joined(several.iter().map(|member| member.weight)),
        };
        let is_single = !hashes(self).contains(',') && !hashes(&current).contains(',');
        require_same(if is_single { "corpus" } else { "corpora" }, &hashes(self), &hashes(&current))?;
        require_same("weights", &weights(self), &weights(&current))?;
        require_same("seed", &self.0.seed.to_string(), &current.0.seed.to_string())?;
        require_same("options", &self.0.options, &current.0.options)?;
        options.lanes_of_rank().map(|lane| self.in_lane(lane as usize)).collect()
    }

    fn in_lane(&self, lane: usize) -> Result<Vec<CorpusPosition>> {
        let position = |member: &LanesOfMember| {
            let (epoch, window, row, turns) = member.lanes.get(lane).copied().flatten().ok_or_else(|| {
                let remedy = "merge the states of all ranks (merge_states)";
                Error::Input(format!("state: lane {lane} is missing; {remedy}"))
            })?;
            if turns > MAX_TURNS {
                return Err(Error::Input(format!("state: turns = {turns}: must be at most {MAX_TURNS}")));
            }
            Ok(CorpusPosition { at: RowPosition { epoch, window, row }, window_rows: 0, turns })
        };
        self.0.corpora.iter().map(position).collect()
    }
}

fn joined(parts: impl Iterator<Item = impl ToString>) -> String {
    parts.map(|part| part.to_string()).collect::<Vec<_>>().join(", ")
}

fn require_same(name: &str, saved: &str, actual: &str) -> Result<()> {
    if saved == actual {
        return Ok(());
    }
    Err(Error::Input(format!(
        "state: {name} = {saved:?}, but this loader has {actual:?}; create the loader with the same settings"
    )))
}

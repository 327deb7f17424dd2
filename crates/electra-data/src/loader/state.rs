//! The state from which a loader resumes.

use serde::{Deserialize, Serialize};

use super::mixture::Mixture;
use super::options::LoaderOptions;
use crate::error::{Error, Result};

/// A position between two rows of a corpus's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RowPosition {
    /// Number of finished epochs.
    pub epoch: u32,
    /// Number of finished windows of this epoch.
    pub window: u32,
    /// Number of finished rows of this window.
    pub row: u64,
}

impl RowPosition {
    /// The start of the next window, given the number of windows per epoch.
    pub fn next_window(self, num_windows: u32) -> Self {
        let window = self.window + 1;
        if window < num_windows {
            return Self { window, row: 0, ..self };
        }
        Self { epoch: self.epoch.saturating_add(1), window: 0, row: 0 }
    }
}

/// A corpus's position, and its turns in the mixture.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CorpusPosition {
    /// The position in the corpus's stream.
    pub at: RowPosition,
    /// Rows of the current window; 0 at its start, where the number may not be known yet.
    pub window_rows: u64,
    /// Rows given since a corpus last left the mixture; unused for a single corpus.
    pub turns: u64,
}

/// No loader has given more rows than this, so that products with weights fit into 128 bits.
const MAX_TURNS: u64 = 1 << 48;

/// The position of a loader, with what identifies its corpora and options: all that it needs to resume. As JSON, less
/// than 256 bytes for one corpus, and about 110 per corpus of a mixture; with several lanes, about 20 per corpus and
/// lane. A rank knows the positions of its own lanes only: `merged` combines the states of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoaderState(Saved);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum Saved {
    Single(Single),
    Mixture(Several<Member>),
    Lanes(Several<LanesOfMember>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Epoch, window, row and turns of each lane; none for a lane of another rank.
    lanes: Vec<Option<(u32, u32, u64, u64)>>,
}

impl LoaderState {
    /// The state of a loader with these options whose corpora are at `positions` in each of its lanes.
    pub(super) fn new(positions: &[Vec<CorpusPosition>], options: &LoaderOptions, mixture: &Mixture) -> Self {
        let (seed, content) = (options.seed as u64, options.content());
        let members = mixture.corpora.iter().zip(&mixture.weights).enumerate();
        let members =
            members.map(|(number, (blocks, &weight))| (number, blocks.corpus.content_hash(), weight));
        if options.lanes > 1 {
            let corpora = members.map(|(number, corpus, weight)| {
                let mut lanes = vec![None; options.lanes as usize];
                for (lane, positions) in options.lanes_of_rank().zip(positions) {
                    let CorpusPosition { at, turns, .. } = positions[number];
                    lanes[lane as usize] = Some((at.epoch, at.window, at.row, turns));
                }
                LanesOfMember { corpus: corpus.into(), weight, lanes }
            });
            return Self(Saved::Lanes(Several { corpora: corpora.collect(), seed, options: content }));
        }
        let mut corpora: Vec<Member> = members
            .map(|(number, corpus, weight)| {
                let CorpusPosition { at: RowPosition { epoch, window, row }, turns, .. } =
                    positions[0][number];
                Member { corpus: corpus.into(), weight, epoch, window, row, turns }
            })
            .collect();
        if corpora.len() > 1 {
            return Self(Saved::Mixture(Several { corpora, seed, options: content }));
        }
        let Member { corpus, epoch, window, row, .. } = corpora.remove(0);
        Self(Saved::Single(Single { epoch, window, row, seed, corpus, options: content }))
    }

    /// The state of a loader whose ranks have these states after the same batch. States of different batches are
    /// [`Error::Input`].
    pub fn merged(states: Vec<Self>) -> Result<Self> {
        let mut states = states.into_iter();
        let first = states.next().ok_or_else(|| Error::Input("there is no state to merge".into()))?;
        states.try_fold(first, |merged, state| match merged.union(&state) {
            Some(both) => Ok(both),
            None => Err(Error::Input(format!(
                "states of different loaders or batches cannot be merged: {} and {}",
                merged.to_json()?,
                state.to_json()?
            ))),
        })
    }

    /// This state with the lanes of another one, if they agree on all else.
    fn union(&self, other: &Self) -> Option<Self> {
        let (Saved::Lanes(ours), Saved::Lanes(theirs)) = (&self.0, &other.0) else {
            return (self == other).then(|| self.clone());
        };
        let frame = |state: &Several<LanesOfMember>| {
            let corpora = state.corpora.iter().map(|m| (m.corpus.clone(), m.weight, m.lanes.len()));
            (corpora.collect::<Vec<_>>(), state.seed, state.options.clone())
        };
        let mut both = ours.clone();
        for (member, other) in both.corpora.iter_mut().zip(&theirs.corpora) {
            for (lane, other) in member.lanes.iter_mut().zip(&other.lanes) {
                if lane.is_some() && other.is_some() && lane != other {
                    return None;
                }
                *lane = lane.or(*other);
            }
        }
        (frame(ours) == frame(theirs)).then_some(Self(Saved::Lanes(both)))
    }

    /// Parses a state from the JSON that [`LoaderState::to_json`] returned.
    pub fn from_json(json: &str) -> Result<Self> {
        let parsed = serde_json::from_str::<serde_json::Value>(json).unwrap_or_default();
        let saved = if parsed["corpora"][0].get("lanes").is_some() {
            serde_json::from_str(json).map(Saved::Lanes)
        } else if parsed.get("corpora").is_some() {
            serde_json::from_str(json).map(Saved::Mixture)
        } else {
            serde_json::from_str(json).map(Saved::Single)
        };
        let saved = saved.map_err(|error| {
            Error::Input(format!("state: {error}; give what state() returned, unchanged"))
        })?;
        Ok(Self(saved))
    }

    /// The state as a JSON object.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::Input(format!("state: {error}")))
    }

    /// The corpora's positions in each lane of the rank, if the state is that of a loader of this mixture with these
    /// options.
    pub(super) fn positions(
        &self,
        options: &LoaderOptions,
        mixture: &Mixture,
    ) -> Result<Vec<Vec<CorpusPosition>>> {
        let start = vec![CorpusPosition::default(); mixture.corpora.len()];
        let ours = Self::new(&vec![start; options.lanes_of_rank().len()], options, mixture);
        require_same_corpora(&self.0, &ours.0)?;
        let (seed, content) = self.0.stream();
        let (our_seed, our_content) = ours.0.stream();
        require_same("seed", &seed.to_string(), &our_seed.to_string())?;
        require_same("options", content, our_content)?;
        options.lanes_of_rank().map(|lane| self.0.positions(lane as usize)).collect()
    }
}

impl Saved {
    /// Returns the settings that, with the corpora, determine the streams of rows.
    fn stream(&self) -> (u64, &str) {
        match self {
            Self::Single(state) => (state.seed, &state.options),
            Self::Mixture(state) => (state.seed, &state.options),
            Self::Lanes(state) => (state.seed, &state.options),
        }
    }

    /// The content hashes, separated by commas.
    fn hashes(&self) -> String {
        match self {
            Self::Single(state) => state.corpus.clone(),
            Self::Mixture(state) => joined(state.corpora.iter().map(|member| &member.corpus)),
            Self::Lanes(state) => joined(state.corpora.iter().map(|member| &member.corpus)),
        }
    }

    /// The weights, which a corpus alone does not need.
    fn weights(&self) -> String {
        match self {
            Self::Mixture(state) => joined(state.corpora.iter().map(|member| member.weight)),
            Self::Lanes(state) if state.corpora.len() > 1 => {
                joined(state.corpora.iter().map(|member| member.weight))
            }
            _ => String::new(),
        }
    }

    /// The corpora's positions in a lane.
    fn positions(&self, lane: usize) -> Result<Vec<CorpusPosition>> {
        let positions: Vec<_> = match self {
            Self::Single(state) => vec![position(state.epoch, state.window, state.row, 0)],
            Self::Mixture(state) => {
                state.corpora.iter().map(|m| position(m.epoch, m.window, m.row, m.turns)).collect()
            }
            Self::Lanes(state) => {
                let in_lane = state.corpora.iter().map(|member| member.lanes.get(lane).copied().flatten());
                let positions = in_lane
                    .map(|at| at.map(|(epoch, window, row, turns)| position(epoch, window, row, turns)));
                positions.collect::<Option<_>>().ok_or_else(|| {
                    Error::Input(format!(
                        "state: has no lane {lane}; merge the states of all ranks (merge_states)"
                    ))
                })?
            }
        };
        match positions.iter().find(|position| position.turns > MAX_TURNS) {
            Some(CorpusPosition { turns, .. }) => {
                Err(Error::Input(format!("state: turns {turns}: no loader has given so many rows")))
            }
            None => Ok(positions),
        }
    }
}

fn position(epoch: u32, window: u32, row: u64, turns: u64) -> CorpusPosition {
    CorpusPosition { at: RowPosition { epoch, window, row }, window_rows: 0, turns }
}

fn joined(parts: impl Iterator<Item = impl ToString>) -> String {
    parts.map(|part| part.to_string()).collect::<Vec<_>>().join(", ")
}

fn require_same_corpora(saved: &Saved, ours: &Saved) -> Result<()> {
    let is_single = !saved.hashes().contains(',') && !ours.hashes().contains(',');
    require_same(if is_single { "corpus" } else { "corpora" }, &saved.hashes(), &ours.hashes())?;
    require_same("weights", &saved.weights(), &ours.weights())
}

fn require_same(what: &str, saved: &str, ours: &str) -> Result<()> {
    if saved == ours {
        return Ok(());
    }
    Err(Error::Input(format!(
        "state: saved with {what} {saved:?} but this loader has {ours:?}; create the loader with the same settings"
    )))
}

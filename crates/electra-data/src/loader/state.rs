//! The state from which a loader resumes.

use serde::{Deserialize, Serialize};

use super::mixture::Mixture;
use super::options::LoaderOptions;
use super::shuffle_window::{CorpusPosition, RowPosition};
use crate::error::{Error, Result};

/// No loader has given more rows than this, so that products with weights fit into 128 bits.
const MAX_TURNS: u64 = 1 << 48;

/// The position of a loader, with what identifies its corpora and options: all that it needs to resume. As JSON, less
/// than 256 bytes for one corpus, and about 110 per corpus of a mixture; with several lanes, about 20 per corpus and
/// lane. A rank knows the positions of its own lanes only: `merged` combines the states of all ranks.
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
    /// Epoch, window, row and turns of each lane; none for a lane of another rank.
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

    /// The state of a loader whose ranks have these states; those of different batches are [`Error::Input`].
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
        let failed = |error| Error::Input(format!("state: {error}; give what state() returned, unchanged"));
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
        let ours = Self::new(&vec![start; options.lanes_of_rank().len()], options, mixture);
        let hashes = |Self(state): &Self| joined(state.corpora.iter().map(|member| &member.corpus));
        let weights = |Self(state): &Self| match &state.corpora[..] {
            [_] => String::new(), // which a corpus alone does not need
            several => joined(several.iter().map(|member| member.weight)),
        };
        let is_single = !hashes(self).contains(',') && !hashes(&ours).contains(',');
        require_same(if is_single { "corpus" } else { "corpora" }, &hashes(self), &hashes(&ours))?;
        require_same("weights", &weights(self), &weights(&ours))?;
        require_same("seed", &self.0.seed.to_string(), &ours.0.seed.to_string())?;
        require_same("options", &self.0.options, &ours.0.options)?;
        options.lanes_of_rank().map(|lane| self.in_lane(lane as usize)).collect()
    }

    fn in_lane(&self, lane: usize) -> Result<Vec<CorpusPosition>> {
        let position = |member: &LanesOfMember| {
            let (epoch, window, row, turns) = member.lanes.get(lane).copied().flatten().ok_or_else(|| {
                let remedy = "merge the states of all ranks (merge_states)";
                Error::Input(format!("state: has no lane {lane}; {remedy}"))
            })?;
            if turns > MAX_TURNS {
                return Err(Error::Input(format!("state: turns {turns}: no loader has given so many rows")));
            }
            Ok(CorpusPosition { at: RowPosition { epoch, window, row }, window_rows: 0, turns })
        };
        self.0.corpora.iter().map(position).collect()
    }
}

fn joined(parts: impl Iterator<Item = impl ToString>) -> String {
    parts.map(|part| part.to_string()).collect::<Vec<_>>().join(", ")
}

fn require_same(what: &str, saved: &str, ours: &str) -> Result<()> {
    if saved == ours {
        return Ok(());
    }
    Err(Error::Input(format!(
        "state: saved with {what} {saved:?} but this loader has {ours:?}; create the loader with the same settings"
    )))
}

//! Rows to Arrow record batches: the schema, and the writer that fills a batch in place.
//!
//! All fixed-size columns of a batch share one buffer, which is reused once the consumer has dropped the
//! batch. So a running loader neither allocates memory nor causes page faults.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use arrow_array::{ArrayRef, FixedSizeListArray, Float32Array, Int32Array, ListArray, RecordBatch};
use arrow_buffer::{Buffer, MutableBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema, SchemaRef};

use super::mask::Masker;
use super::pack::{Boundary, Span};
use super::shuffle_window::{Row, ShuffleWindow};
use crate::error::{Error, Result};
use crate::format::{Corpus, Shard, SpecialTokens};
use crate::philox::{Purpose, Stream};
use crate::threads::lock;

/// Columns begin at multiples of 128 bytes, like Arrow's buffers.
const ALIGNED_WORDS: usize = 32;
/// Fixed-size columns: four per token, three per mask slot.
const COLUMNS: usize = 7;
const PREFETCH_ROWS: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct RowRange {
    pub window: Arc<ShuffleWindow>,
    pub rows: Range<u64>,
}

impl RowRange {
    pub fn len(&self) -> u64 {
        self.rows.end - self.rows.start
    }
}

/// The schema of a batch of rows of `length` tokens with `slots` mask slots each.
///
/// | column | per row | meaning |
/// | --- | --- | --- |
/// | `input_ids` | int32 x length | tokens, masked |
/// | `token_type_ids` | int32 x length | 1 for the second text of an attention segment, else 0 |
/// | `position_ids` | int32 x length | counted from each segment's `[CLS]`; 0 for padding |
/// | `segment_ids` | int32 x length | attention segment, counted from 1; 0 for padding |
/// | `masked_positions` | int32 x slots | positions in the row |
/// | `masked_ids` | int32 x slots | the tokens replaced there |
/// | `masked_weights` | float32 x slots | 1 for a slot in use, else 0 |
/// | `segment_lengths` | list of int32 | tokens of each segment; they add up to the row without padding |
pub(super) fn schema(length: usize, slots: usize, pad: u32) -> Schema {
    let (ints, floats) = (item(DataType::Int32), item(DataType::Float32));
    let fixed = |name: &str, item: &FieldRef, size: usize| {
        Field::new(name, DataType::FixedSizeList(item.clone(), size as i32), false)
    };
    let fields = vec![
        fixed("input_ids", &ints, length),
        fixed("token_type_ids", &ints, length),
        fixed("position_ids", &ints, length),
        fixed("segment_ids", &ints, length),
        fixed("masked_positions", &ints, slots),
        fixed("masked_ids", &ints, slots),
        fixed("masked_weights", &floats, slots),
        Field::new("segment_lengths", DataType::List(ints.clone()), false),
    ];
    let metadata = [("sequence_length", length), ("mask_slots", slots), ("pad_id", pad as usize)];
    let metadata: HashMap<_, _> = metadata.map(|(key, value)| (key.to_string(), value.to_string())).into();
    Schema::new_with_metadata(fields, metadata)
}

fn item(data_type: DataType) -> FieldRef {
    Arc::new(Field::new("item", data_type, false))
}

/// Buffers of earlier batches, some of which consumers may still hold.
#[derive(Debug, Default)]
pub(super) struct BufferPool {
    buffers: Mutex<Vec<Buffer>>,
}

impl BufferPool {
    /// Upper bound on the buffers in this pool, for consumers that keep all batches.
    const MAX_BUFFERS: usize = 16;

    fn take(&self, words: usize) -> MutableBuffer {
        let mut buffers = lock(&self.buffers);
        for _ in 0..buffers.len() {
            match buffers.remove(0).into_mutable() {
                Ok(mut free) => {
                    free.resize(4 * words, 0);
                    return free;
                }
                Err(held) => buffers.push(held),
            }
        }
        MutableBuffer::from_len_zeroed(4 * words)
    }

    fn give(&self, buffer: &Buffer) {
        let mut buffers = lock(&self.buffers);
        if buffers.len() == Self::MAX_BUFFERS {
            buffers.remove(0);
        }
        buffers.push(buffer.clone());
    }
}

pub(super) struct BatchWriter {
    schema: SchemaRef,
    length: usize,
    tokens: SpecialTokens,
    masker: Masker,
    pool: Arc<BufferPool>,
}

impl BatchWriter {
    pub fn new(corpus: &Corpus, length: usize, masker: Masker, pool: Arc<BufferPool>) -> Self {
        let tokens = corpus.special_tokens();
        let schema = Arc::new(schema(length, masker.slots, tokens.pad));
        Self { schema, length, tokens, masker, pool }
    }

    pub fn write(&mut self, ranges: &[RowRange]) -> Result<RecordBatch> {
        let rows = ranges.iter().map(|range| range.len() as usize).sum();
        let (length, slots) = (self.length, self.masker.slots);
        let sizes = [length, length, length, length, slots, slots, slots].map(|size| size * rows);
        let mut buffer = self.pool.take(sizes.iter().map(|&size| padded(size)).sum());
        let mut columns = carve(buffer.typed_data_mut(), sizes);
        columns[1].fill(0); // token_type_ids, most of which are 0
        let mut segments = Vec::with_capacity(2 * rows);
        let mut ends = Vec::with_capacity(rows + 1);
        ends.push(0_i32);
        // All rows are looked up before any is copied: they are scattered over the window, and in a loop this
        // short, the processor waits for many of them at the same time.
        let ordered = ranges.iter().flat_map(|range| range.rows.clone().map(|row| range.window.row(row)));
        let ordered: Vec<Row<'_>> = ordered.collect();
        ordered.iter().take(PREFETCH_ROWS).for_each(Row::prefetch);
        for (number, &row) in ordered.iter().enumerate() {
            if let Some(later) = ordered.get(number + PREFETCH_ROWS) {
                later.prefetch();
            }
            let target = self.target(&mut columns, number);
            self.write_row(row, target, &mut segments)?;
            ends.push(segments.len() as i32);
        }
        let buffer = Buffer::from(buffer);
        self.pool.give(&buffer);
        self.assemble(rows, &buffer, sizes, segments, ends).map_err(|error| {
            Error::Input(format!("a batch of {rows} rows of {length} tokens is impossible: {error}"))
        })
    }

    fn target<'a>(&self, columns: &'a mut [&mut [i32]; COLUMNS], number: usize) -> Target<'a> {
        let (length, slots) = (self.length, self.masker.slots);
        let (tokens, masks) = (number * length..(number + 1) * length, number * slots..(number + 1) * slots);
        let [ids, types, positions, segment_ids, masked_positions, masked_ids, weights] = columns;
        Target {
            ids: &mut ids[tokens.clone()],
            types: &mut types[tokens.clone()],
            positions: &mut positions[tokens.clone()],
            segment_ids: &mut segment_ids[tokens],
            masked_positions: &mut masked_positions[masks.clone()],
            masked_ids: &mut masked_ids[masks.clone()],
            weights: &mut weights[masks],
        }
    }

    #[inline]
    fn write_row(&mut self, row: Row<'_>, mut target: Target<'_>, segments: &mut Vec<i32>) -> Result<()> {
        let mut used = 0;
        for (segment, number) in row.spans.chunk_by(|_, next| next.boundary != Boundary::NewSegment).zip(1..)
        {
            let end = self.write_segment(row.shard, segment, used, &mut target)?;
            for (slot, position) in target.positions[used..end].iter_mut().zip(0..) {
                *slot = position;
            }
            target.segment_ids[used..end].fill(number);
            segments.push((end - used) as i32);
            used = end;
        }
        target.ids[used..].fill(self.tokens.pad as i32);
        target.positions[used..].fill(0);
        target.segment_ids[used..].fill(0);
        let mut stream = Stream::new(row.seed, Purpose::Mask, row.counter);
        let ids = &mut target.ids[..used];
        let masked = self.masker.apply(ids, &mut stream, target.masked_positions, target.masked_ids);
        target.weights[..masked].fill(1.0_f32.to_bits() as i32);
        target.weights[masked..].fill(0);
        Ok(())
    }

    /// Writes the tokens of an attention segment at position `start` of the row; returns its end.
    #[inline]
    fn write_segment(
        &self,
        shard: &Shard,
        spans: &[Span],
        start: usize,
        target: &mut Target<'_>,
    ) -> Result<usize> {
        let (sep, mut used, mut second) = (self.tokens.sep as i32, start, None);
        for span in spans {
            match span.boundary {
                Boundary::Continuation => {}
                Boundary::NewSegment => {
                    target.ids[used] = self.tokens.cls as i32;
                    used += 1;
                }
                Boundary::SecondText => {
                    target.ids[used] = sep;
                    used += 1;
                    second = Some(used);
                }
            }
            let end = used + usize::from(span.len);
            shard.copy_tokens(u64::from(span.start), &mut target.ids[used..end])?;
            used = end;
        }
        target.ids[used] = sep;
        used += 1;
        if let Some(second) = second {
            target.types[second..used].fill(1);
        }
        Ok(used)
    }

    fn assemble(
        &self,
        rows: usize,
        buffer: &Buffer,
        sizes: [usize; COLUMNS],
        segments: Vec<i32>,
        ends: Vec<i32>,
    ) -> std::result::Result<RecordBatch, ArrowError> {
        let mut arrays: Vec<ArrayRef> = Vec::with_capacity(COLUMNS + 1);
        let mut start = 0;
        for (size, field) in sizes.into_iter().zip(self.schema.fields()) {
            let slice = buffer.slice_with_length(4 * start, 4 * size);
            start += padded(size);
            let DataType::FixedSizeList(item, width) = field.data_type() else {
                let name = field.name();
                return Err(ArrowError::SchemaError(format!("column {name} is not a fixed-size list")));
            };
            let values: ArrayRef = match item.data_type() {
                DataType::Float32 => Arc::new(Float32Array::new(ScalarBuffer::from(slice), None)),
                _ => Arc::new(Int32Array::new(ScalarBuffer::from(slice), None)),
            };
            arrays.push(Arc::new(FixedSizeListArray::try_new_with_length(
                item.clone(),
                *width,
                values,
                None,
                rows,
            )?));
        }
        let ends = OffsetBuffer::new(ScalarBuffer::from(ends));
        let values = Arc::new(Int32Array::from(segments));
        arrays.push(Arc::new(ListArray::try_new(item(DataType::Int32), ends, values, None)?));
        RecordBatch::try_new(self.schema.clone(), arrays)
    }
}

struct Target<'a> {
    ids: &'a mut [i32],
    /// Zeroed in advance.
    types: &'a mut [i32],
    positions: &'a mut [i32],
    segment_ids: &'a mut [i32],
    masked_positions: &'a mut [i32],
    masked_ids: &'a mut [i32],
    weights: &'a mut [i32],
}

fn padded(words: usize) -> usize {
    words.next_multiple_of(ALIGNED_WORDS)
}

fn carve(words: &mut [i32], sizes: [usize; COLUMNS]) -> [&mut [i32]; COLUMNS] {
    let mut rest = words;
    sizes.map(|size| {
        let (column, others) = std::mem::take(&mut rest).split_at_mut(padded(size));
        rest = others;
        &mut column[..size]
    })
}

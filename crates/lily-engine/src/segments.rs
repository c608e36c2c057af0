//! Where prompts are cut into chunks, and behind which chunks a state is worth its memory.
//!
//! A cut depends on the tokens before it alone. So a prompt that goes on from any cut is computed as it is from its
//! beginning, whatever follows, and answers do not depend on what was kept.

/// A chunk may end with a message where it has this share of a whole chunk's tokens at least. It reads weights as a whole
/// one does: with a quarter, a prompt of short messages has four times the chunks at worst, and what follows a message
/// is never further from a cut than a quarter of a chunk.
pub(crate) const LEAST_SHARE: usize = 4;

/// So many cuts before the end of a prompt are kept: it may be asked again, or parted from within its last message.
const LAST: usize = 3;
/// So many ends of messages before the end are kept: the last messages may be edited.
const MESSAGES: usize = 4;
/// Before those there is one each so many chunks, for prompts that part earlier...
const SPACING: usize = 8;
/// ... and so many at most: in longer prompts they lie further apart.
const MOST_SPACED: usize = 8;

/// How prompts are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segments<'a> {
    /// Tokens of a whole chunk.
    pub chunk: usize,
    /// Tokens that end a message.
    pub stops: &'a [u32],
}

impl Segments<'_> {
    /// How many tokens the next chunk has that begins behind a cut, as far as `rest` tells: to the first end of a message
    /// that is far enough, or a whole chunk.
    pub fn cut(&self, rest: &[u32]) -> Option<usize> {
        let least = self.chunk.div_ceil(LEAST_SHARE);
        let most = rest.len().min(self.chunk);
        let message = (least..=most).find(|&end| self.stops.contains(&rest[end - 1]));
        message.or((rest.len() >= self.chunk).then_some(self.chunk))
    }

    /// All cuts of a prompt.
    pub fn cuts(&self, tokens: &[u32]) -> Vec<usize> {
        let mut cuts = Vec::new();
        let mut done = 0;
        while let Some(length) = self.cut(&tokens[done..]) {
            done += length;
            cuts.push(done);
        }
        cuts
    }

    /// The cuts behind which a state is kept, in order: seventeen at most. `landmark` is a position that a later prompt may
    /// part at, however far back that is.
    pub fn kept(&self, tokens: &[u32], landmark: Option<usize>) -> Vec<usize> {
        let cuts = self.cuts(tokens);
        let ends = (1..=tokens.len()).filter(|&end| self.stops.contains(&tokens[end - 1]));
        let ends: Vec<usize> = ends.collect();
        // Where a message is too short for a cut, the one before it serves.
        let up_to = |end: usize| cuts[..cuts.partition_point(|&cut| cut <= end)].last();
        // Other conversations begin with the same first message: instructions and tools.
        let messages = ends.iter().take(1).chain(ends.iter().rev().take(MESSAGES));
        let mut spacing = SPACING * self.chunk;
        while tokens.len() / spacing > MOST_SPACED {
            spacing *= 2;
        }
        // The first in each stretch, so that those of a longer prompt are some of a shorter one's.
        let mut before = 0;
        let spaced = cuts.iter().filter(|&&cut| {
            let is_first = cut / spacing > before / spacing;
            before = cut;
            is_first
        });
        let mut kept: Vec<usize> = spaced
            .chain(cuts.iter().rev().take(LAST))
            .chain(messages.copied().chain(landmark).filter_map(up_to))
            .copied()
            .collect();
        kept.sort_unstable();
        kept.dedup();
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: u32 = 9;

    fn segments() -> Segments<'static> {
        Segments {
            chunk: 16,
            stops: &[STOP],
        }
    }

    /// A text of messages with these lengths, their ends included.
    fn messages(lengths: &[usize]) -> Vec<u32> {
        let message = |&length: &usize| {
            let mut message = vec![1; length];
            message[length - 1] = STOP;
            message
        };
        lengths.iter().flat_map(message).collect()
    }

    #[test]
    fn a_message_ends_a_chunk_where_it_is_long_enough() {
        let cuts = |lengths: &[usize]| segments().cuts(&messages(lengths));
        assert_eq!(cuts(&[40]), [16, 32, 40]);
        // 3 tokens behind a cut, or 4.
        assert_eq!(cuts(&[35, 10]), [16, 32, 45]);
        assert_eq!(cuts(&[36, 10]), [16, 32, 36, 46]);
        assert_eq!(cuts(&[16, 16, 3]), [16, 32]);
        assert_eq!(cuts(&[2, 2, 2, 2, 2]), [4, 8]);
        assert_eq!(cuts(&[5, 30]), [5, 21, 35]);
        assert_eq!(segments().cuts(&[1; 47]), [16, 32]);
        assert!(segments().cuts(&[]).is_empty());
        let tiny = Segments {
            chunk: 1,
            stops: &[STOP],
        };
        assert_eq!(tiny.cuts(&messages(&[2, 1])), [1, 2, 3]);
    }

    /// What stands behind a cut has no part in it, and going on from one finds those that follow.
    #[test]
    fn cuts_depend_on_what_is_before_them() {
        // Messages of many lengths, in no order.
        let lengths: Vec<usize> = (0..60usize).map(|i| 1 + i * i * 7 % 41).collect();
        let tokens = messages(&lengths);
        let cuts = segments().cuts(&tokens);
        for end in 0..tokens.len() {
            let fewer = segments().cuts(&tokens[..end]);
            let expected: Vec<usize> = cuts.iter().copied().filter(|&cut| cut <= end).collect();
            assert_eq!(fewer, expected, "{end}");
        }
        for (index, &cut) in cuts.iter().enumerate() {
            let later = segments().cuts(&tokens[cut..]).into_iter();
            let later: Vec<usize> = later.map(|found| cut + found).collect();
            assert_eq!(later, cuts[index + 1..]);
        }
        assert!(
            cuts.windows(2)
                .all(|pair| (4..=16).contains(&(pair[1] - pair[0])))
        );
    }

    #[test]
    fn few_are_kept_and_they_are_near_ends_of_messages() {
        // Before the end of the first message, at those of the last, of which two have no cut of their own, and one each
        // 128.
        let tokens = messages(&[50, 16, 16, 16, 150, 20, 2, 1]);
        assert_eq!(segments().kept(&tokens, None), [48, 128, 248, 264, 268]);
        for count in [1, 10, 100, 1_000, 10_000] {
            let tokens = messages(&vec![20; count]);
            let kept = segments().kept(&tokens, None);
            assert!(kept.len() <= 16, "{count}: {}", kept.len());
            // A longer prompt loses none that it wants.
            let longer = messages(&vec![20; count + 40]);
            let both = segments().kept(&longer, None);
            let cuts = segments().cuts(&tokens);
            let early = both.iter().filter(|&&cut| cut < 20 * count / 2);
            for cut in early {
                assert!(!cuts.contains(cut) || kept.contains(cut), "{count}: {cut}");
            }
        }
    }
}

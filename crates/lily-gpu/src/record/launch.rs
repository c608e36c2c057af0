//! The launch buffer: what varies between the runs of one plan. The host writes it before the first run of a chain, and
//! the kernel that chooses tokens for each run behind that (kernels/turn.h).

use lily_plan::Plan;

/// Sessions: where their memory is, and where they stand.
pub const SESSIONS: usize = 0;
/// Bytes of a session.
pub const SESSION_BYTES: usize = 32;
/// Most sessions of a run.
pub const MOST_SESSIONS: usize = 8;
/// The first id that has no token.
pub const LIMIT: usize = 256;
/// Each row's turns.
pub const TURNS: usize = 512;
/// Bytes of those of a row.
pub const TURN_BYTES: usize = 128;
/// Most tokens that end a row's text.
pub const MOST_STOPS: usize = 30;
/// The run's tokens.
pub const TOKENS: usize = TURNS + MOST_SESSIONS * TURN_BYTES;
/// From the slot of one run's chosen tokens to that of the next: the host reads one while the other is written.
const SLOT_BYTES: usize = 128;

/// Where the chosen tokens begin of run `index` of a chain, in a plan of `rows` rows.
pub fn chosen(rows: usize, index: usize) -> usize {
    (TOKENS + rows * 4).next_multiple_of(SLOT_BYTES) + index % 2 * SLOT_BYTES
}

/// Bytes of two slots of chosen tokens; of as many as a plan chooses that no run follows.
pub fn chosen_bytes(chosen_rows: usize) -> usize {
    (chosen_rows * 4).max(2 * SLOT_BYTES)
}

/// Bytes of all for `plan`.
pub fn bytes(plan: &Plan) -> usize {
    chosen(plan.class.rows, 0) + chosen_bytes(plan.chosen_rows())
}

/// A row's turns before the first: `Turn` of kernels/turn.h. Further stops are for the host to find.
pub fn turn(stops: &[u32]) -> [u8; TURN_BYTES] {
    let stops = &stops[..stops.len().min(MOST_STOPS)];
    let words = [0, stops.len() as u32].into_iter();
    let mut bytes = [0; TURN_BYTES];
    for (to, word) in bytes.chunks_mut(4).zip(words.chain(stops.iter().copied())) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The launch buffer before the first run: sessions with their turns, the first id that has no token, the run's tokens.
pub fn encode(
    sessions: impl Iterator<Item = ([u8; SESSION_BYTES], [u8; TURN_BYTES])>,
    limit: u32,
    tokens: &[u32],
) -> Vec<u8> {
    let mut bytes = vec![0; TOKENS];
    for (index, (session, turn)) in sessions.enumerate() {
        bytes[SESSIONS + index * SESSION_BYTES..][..SESSION_BYTES].copy_from_slice(&session);
        bytes[TURNS + index * TURN_BYTES..][..TURN_BYTES].copy_from_slice(&turn);
    }
    bytes[LIMIT..][..4].copy_from_slice(&limit.to_le_bytes());
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes
}

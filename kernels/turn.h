// From one decode step to the next on the GPU alone: the kernel that chooses a row's token binds the run behind this
// one, which may have been sent off before anyone has seen the token.
#pragma once
#include "session.h"

constant constexpr uint NO_TOKEN = 0xffffffffu;
// In place of a token where the session had been stopped before the run.
constant constexpr uint STOPPED = 0xfffffffeu;
// Sessions of a run.
constant constexpr uint MOST_SESSIONS = 8;
// Tokens that end a text, for each session.
constant constexpr uint MOST_STOPS = 30;

// A row's way through the runs of a chain.
struct Turn {
    // Runs since the host bound the first.
    uint count;
    uint stop_count;
    uint stops[MOST_STOPS];
};

// What every run is bound to; lily-gpu/src/record/launch.rs has it too.
struct RunTable {
    Session sessions[MOST_SESSIONS];
    // The first id that has no token.
    uint limit;
    uint unused[63];
    Turn turns[MOST_SESSIONS];
};

// Words from the slot of the chosen tokens of one run to that of the next.
constant constexpr uint SLOT_WORDS = 32;

inline bool is_stopped(device const RunTable* table, uint row) { return !SEQUENCE && table->sessions[row].is_stopped != 0; }

// Hands a row's token out, and binds the next run of its session: the token behind it, the next copies live. Runs take
// two slots in turn, so that the host reads one while the other is written. A token that ends the text, or none,
// stops the session: the run behind repeats the same step with the same results, and moves nothing on.
inline void take_turn(device RunTable* table, device uint* tokens, device uint* chosen, uint row, uint token) {
    if (SEQUENCE) {
        chosen[row] = token;
        return;
    }
    device Turn* turn = &table->turns[row];
    device Session* session = &table->sessions[row];
    chosen[(turn->count & 1) * SLOT_WORDS + row] = session->is_stopped != 0 ? STOPPED : token;
    turn->count += 1;
    bool is_last = token == NO_TOKEN;
    for (uint i = 0; i < turn->stop_count; ++i) is_last = is_last || turn->stops[i] == token;
    if (is_last) session->is_stopped = 1;
    if (session->is_stopped != 0) return;
    tokens[row] = token;
    session->position += 1;
    device uchar* live = session->next;
    session->next = session->live;
    session->live = live;
}

// What a run is bound to: sessions, their positions, their memory.
#pragma once
#include "elements.h"

// Positions of a page of the KV cache.
constant constexpr uint PAGE = 256;

// A page of the KV cache: for each attention layer, keys and then values as [KV heads, PAGE, head width].
struct CachePage {
    device uchar* memory;
};

// A session as one run sees it. Addresses are the GPU's own.
struct Session {
    // Its pages in the order of positions.
    device const CachePage* pages;
    // Convolution histories and recurrent states before this run, and where those after it go.
    device uchar* live;
    device uchar* next;
    // Position of the run's first token.
    uint position;
    // Whether its text has ended: it stays where it is, whatever runs.
    uint is_stopped;
};

// Whether the rows of a run are consecutive tokens of one session (prefill), or one token each of several.
constant bool SEQUENCE [[function_constant(60)]];

inline uint session_of(uint row) { return SEQUENCE ? 0 : row; }

inline uint position_of(device const Session* sessions, uint row) {
    return SEQUENCE ? sessions[0].position + row : sessions[row].position;
}

// A row of a head's recurrent state, read into the row behind it.
#include "delta.h"

kernel void state_rows(
    device uchar* base [[buffer(0)]],
    constant uint& head [[buffer(1)]],
    constant uint& row [[buffer(2)]],
    uint lane [[thread_index_in_simdgroup]])
{
    StateRows<1> state;
    load_state(state, base, head, row, lane);
    store_state(state, base, head, row + 1, lane);
}

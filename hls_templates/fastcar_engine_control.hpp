// From the arguments of a call to what the array does: the controller's queue, or the arguments themselves.
#ifndef FASTCAR_ENGINE_CONTROL_HPP
#define FASTCAR_ENGINE_CONTROL_HPP

#include "fastcar_drs.hpp"
#include "fastcar_engine_core.hpp"

namespace fastcar {

static const uint32_t OP_NONE = 0xFFFFFFFFu;  // nothing is computed or copied

// Arguments of decode(): those of the call, or what the controller makes of them.
struct Launch {
    uint32_t op;
    uint32_t prefetch;
    uint32_t computing;
    uint32_t copied;
};

// The array executes the queue of the controller. A linear, and an MLP of no layer, have none: all of their rows are placed
// here.
template <class C, class D>
static Launch launch(uint32_t op, uint32_t prefetch, const drs::Call& call, const word_t* table, uint32_t table_bytes,
                     const word_t* query, const word_t* key, const word_t* chain,
                     core_t core_of[INDEX_REGISTER_BITS], pass_t pass_of[INDEX_REGISTER_BITS], word_t* result) {
    FASTCAR_NO_INLINE
    Launch made = {op, prefetch, call.mask, ~call.mask};
    if (op == drs::OP_TABLE || op == drs::OP_GATE || (op == OP_MLP && call.layer != drs::NO_LAYER)) {
        const drs::Queue queue = drs::control<D>(op, table, table_bytes, call, query, key, key, chain, core_of, pass_of, result);
        const bool fills = queue.fills && op == drs::OP_GATE;
        made.op = queue.layer == drs::NO_LAYER ? OP_NONE : OP_MLP;
        made.prefetch = fills ? PREFETCH_FILL : queue.held ? PREFETCH_HELD : 0u;
        made.computing = fills ? 0xFFFFFFFFu : queue.computing;
        made.copied = queue.copied;
    } else {
        place_rows<PLACE_BITS>(call.mask, C::BATCH, C::CORES, core_of, pass_of);
    }
    return made;
}

// Passes that the rows need: one more than the last.
template <class C>
int passes_of(uint32_t computing, const pass_t pass_of[INDEX_REGISTER_BITS]) {
    FASTCAR_NO_INLINE
    int passes = 0;
find_last_pass:
    for (int row = 0; row < C::BATCH; ++row) {
        FASTCAR_PIPELINE(1)
        const int needed = row_computes(computing, row) ? pass_of[row].to_int() + 1 : 0;
        passes = needed > passes ? needed : passes;
    }
    return passes;
}

}  // namespace fastcar

#endif

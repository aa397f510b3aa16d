// Words of the instructions of a decode step. Written by fastcar_compile/codegen/hls/step_program/program.py; a test compares them.
#ifndef FASTCAR_STEP_FIELDS_HPP
#define FASTCAR_STEP_FIELDS_HPP

namespace fastcar {
namespace step {

static const int INSTRUCTION_WORDS = 16;

enum StepOpcode {
    OP_LOAD = 1,
    OP_NORM = 2,
    OP_LINEAR = 3,
    OP_MLP = 4,
    OP_ROTATE = 5,
    OP_APPEND_KEYS = 6,
    OP_APPEND_VALUES = 7,
    OP_ATTEND = 8,
    OP_ADD = 9,
    OP_DECIDE = 10,
    OP_REPLAY = 11,
    OP_END = 12,
    OP_DECIDE_ROWS = 13,
};

enum Place {
    X_ROWS = 0,
    A_ROWS = 1,
    Y_ROWS = 2,
    Q_ROWS = 3,
    K_ROWS = 4,
    OUTPUT_ROWS = 5,
    INPUT_ROWS = 6,
};

enum LoadField {
    LOAD_TARGET = 1,
    LOAD_COUNT = 2,
    LOAD_WORDS = 3,
};

enum NormField {
    NORM_SOURCE = 1,
    NORM_TARGET = 2,
    NORM_FIRST = 3,
    NORM_COUNT = 4,
    NORM_PIECES = 5,
    NORM_WEIGHT = 6,
    NORM_INVERSE_SIZE = 7,
    NORM_EPSILON = 8,
    NORM_WORDS = 9,
};

enum LinearField {
    LINEAR_SOURCE = 1,
    LINEAR_TARGET = 2,
    LINEAR_INPUTS = 3,
    LINEAR_CHANNELS = 4,
    LINEAR_TILE = 5,
    LINEAR_TILES = 6,
    LINEAR_BIAS = 7,
    LINEAR_WEIGHTS = 8,
    LINEAR_WORDS = 9,
};

enum MlpField {
    MLP_SOURCE = 1,
    MLP_TARGET = 2,
    MLP_WEIGHTS = 3,
    MLP_WORDS = 4,
};

enum RotateField {
    ROTATE_SOURCE = 1,
    ROTATE_TARGET = 2,
    ROTATE_FIRST = 3,
    ROTATE_HEADS = 4,
    ROTATE_HEAD_WORDS = 5,
    ROTATE_HALF_WORDS = 6,
    ROTATE_TABLE = 7,
    ROTATE_TABLE_ROWS = 8,
    ROTATE_WORDS = 9,
};

enum AppendKeysField {
    APPEND_KEYS_SOURCE = 1,
    APPEND_KEYS_FIRST = 2,
    APPEND_KEYS_HEADS = 3,
    APPEND_KEYS_BLOCKS = 4,
    APPEND_KEYS_CACHE = 5,
    APPEND_KEYS_SINKS = 6,
    APPEND_KEYS_RING = 7,
    APPEND_KEYS_WORDS = 8,
};

enum AppendValuesField {
    APPEND_VALUES_SOURCE = 1,
    APPEND_VALUES_FIRST = 2,
    APPEND_VALUES_HEADS = 3,
    APPEND_VALUES_BLOCKS = 4,
    APPEND_VALUES_CACHE = 5,
    APPEND_VALUES_SINKS = 6,
    APPEND_VALUES_RING = 7,
    APPEND_VALUES_WORDS = 8,
};

enum AttendField {
    ATTEND_SOURCE = 1,
    ATTEND_TARGET = 2,
    ATTEND_HEADS = 3,
    ATTEND_KEY_HEADS = 4,
    ATTEND_BLOCKS = 5,
    ATTEND_KEYS = 6,
    ATTEND_VALUES = 7,
    ATTEND_SINKS = 8,
    ATTEND_RING = 9,
    ATTEND_WINDOW = 10,
    ATTEND_FACTOR = 11,
    ATTEND_WORDS = 12,
};

enum AddField {
    ADD_SOURCE = 1,
    ADD_TARGET = 2,
    ADD_COUNT = 3,
    ADD_WORDS = 4,
};

enum DecideField {
    DECIDE_GATE = 1,
    DECIDE_STRIDE = 2,
    DECIDE_CHAIN = 3,
    DECIDE_SOURCE = 4,
    DECIDE_HEADS = 5,
    DECIDE_KEY_HEADS = 6,
    DECIDE_BLOCKS = 7,
    DECIDE_KEYS = 8,
    DECIDE_SINKS = 9,
    DECIDE_RING = 10,
    DECIDE_INPUT = 11,
    DECIDE_COUNT = 12,
    DECIDE_INPUTS = 13,
    DECIDE_NETWORK = 14,
    DECIDE_UNITS = 15,
    DECIDE_WORDS = 16,
};

enum ReplayField {
    REPLAY_SOURCE = 1,
    REPLAY_TARGET = 2,
    REPLAY_COUNT = 3,
    REPLAY_SLOTS = 4,
    REPLAY_CACHE = 5,
    REPLAY_WORDS = 6,
};

enum EndField {
    END_WORDS = 1,
};

enum DecideRowsField {
    DECIDE_ROWS_QUERY_WORDS = 1,
    DECIDE_ROWS_KEY_WORDS = 2,
    DECIDE_ROWS_NETWORK = 3,
    DECIDE_ROWS_UNITS = 4,
    DECIDE_ROWS_COUNT = 5,
    DECIDE_ROWS_WORDS = 6,
};

}  // namespace step
}  // namespace fastcar

#endif

// Process send_tile: the words of a tile's results leave in row order, a word per clock. The i-th row that computes is on
// core i mod CORES in pass i div CORES.
module fastcar_send #(
    parameter int CORES = 1,
    parameter int PASSES = 1,
    parameter int RESULT_WORDS = 2
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic [19:0] rows,
    input logic [19:0] whole,
    input logic [19:0] result_words,
    input logic blocks_ready,
    output logic begins,
    output logic ends,
    output logic busy,
    // Results, written by the process before.
    input logic write_results,
    input logic [1:0] write_copy,
    input logic [1:0] read_copy,
    input logic [19:0] result_at,
    input logic [CORES*128-1:0] results,
    // To the stream of results; with `room` it takes four words more at least.
    input logic room,
    output logic put,
    output logic [127:0] word
);
    localparam int WORDS = PASSES * RESULT_WORDS, WORD_BITS = $clog2(2 * WORDS);
    logic [19:0] left, i, row, core, base;
    wire [19:0] words = left < whole ? left : whole;
    wire last_word = i == words - 20'd1;
    wire last_core = core == 20'(CORES - 1);
    wire step;
    fastcar_stage #(.DEPTH(2)) stage (
        .clk, .reset, .go, .tiles, .ready(blocks_ready), .advance(room), .last(last_word && row == rows - 20'd1),
        .begins, .step, .ends, .busy
    );
    always_ff @(posedge clk) begin
        if (begins) begin
            i <= 20'd0;
            row <= 20'd0;
            core <= 20'd0;
            base <= 20'd0;
        end else if (step) begin
            i <= last_word ? 20'd0 : i + 20'd1;
            row <= row + 20'(last_word);
            if (last_word) core <= last_core ? 20'd0 : core + 20'd1;
            if (last_word && last_core) base <= base + 20'(RESULT_WORDS);
        end
        if (go) left <= result_words;
        else if (ends) left <= left - whole;
    end
    wire [CORES*128-1:0] found;
    for (genvar c = 0; c < CORES; c++) begin : g_core
        fastcar_ram #(.BITS(128), .WORDS(2 * WORDS)) result (
            .clk, .write(write_results), .write_at(WORD_BITS'(result_at + (write_copy[0] ? 20'(WORDS) : 20'd0))),
            .data(results[128*c+:128]),
            .read_at(WORD_BITS'(base + i + (read_copy[0] ? 20'(WORDS) : 20'd0))), .found(found[128*c+:128])
        );
    end
    wire [19:0] core_word;
    fastcar_delay #(.BITS(21), .CLOCKS(2)) d_word (.clk, .in({step, core}), .out({put, core_word}));
    always_comb begin
        word = 128'd0;
        for (int c = 0; c < CORES; c++) if (core_word == 20'(c)) word = found[128*c+:128];
    end
endmodule

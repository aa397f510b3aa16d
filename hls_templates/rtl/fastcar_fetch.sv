// Process fetch_tile: a word of every port per clock from the weight stream to the blocks of the tile: scales, biases, weights.
module fastcar_fetch #(
    parameter int PORTS = 4
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic [19:0] scale_words,
    input logic [19:0] head_words,
    input logic [19:0] stream_words,
    input logic blocks_ready,
    output logic begins,
    output logic ends,
    output logic busy,
    input logic [PORTS-1:0] valid,
    input logic [PORTS*128-1:0] words,
    output logic taken,
    output logic to_scales,
    output logic to_biases,
    output logic to_tile,
    output logic [19:0] at,
    output logic [PORTS*128-1:0] data
);
    logic [19:0] word;
    wire last = word == stream_words - 20'd1;
    wire step;
    fastcar_stage #(.DEPTH(1)) stage (
        .clk, .reset, .go, .tiles, .ready(blocks_ready), .advance(&valid), .last, .begins, .step, .ends, .busy
    );
    assign taken = step;
    always_ff @(posedge clk) begin
        if (begins) word <= 20'd0;
        else if (step) word <= word + 20'd1;
        to_scales <= step && word < scale_words;
        to_biases <= step && word >= scale_words && word < head_words;
        to_tile <= step && word >= head_words;
        at <= word - (word < scale_words ? 20'd0 : word < head_words ? scale_words : head_words);
        data <= words;
    end
endmodule

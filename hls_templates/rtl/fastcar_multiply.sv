// Process mac_tile: the tile and the int8 rows against each other, a word of every port and core per clock, pass by pass. A
// sum ends after `sum_words` words. Bit-exact integers.
module fastcar_multiply #(
    parameter int PORTS = 4,
    parameter int CORES = 1,
    parameter int PASSES = 1,
    parameter int WEIGHT_BITS = 4,
    parameter int TILE_WORDS = 64,
    parameter int CHANNEL_WORDS = 12,
    parameter TILE_STYLE = "auto",
    localparam int LANES = 128 / WEIGHT_BITS,
    localparam int TILE_BITS = $clog2(2 * TILE_WORDS),
    localparam int ROW_BITS = $clog2(PASSES * CHANNEL_WORDS + 1)
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic [19:0] passes,
    input logic [19:0] tile_words,
    input logic [19:0] channel_words,
    input logic [19:0] sum_words,
    input logic blocks_ready,
    output logic begins,
    output logic ends,
    output logic busy,
    // The tile, written by fetch; the rows, written by the quantiser.
    input logic write_tile,
    input logic [1:0] write_copy,
    input logic [1:0] read_copy,
    input logic [19:0] write_at,
    input logic [PORTS*128-1:0] words,
    input logic [CORES-1:0] write_row,
    input logic [19:0] row_at,
    input logic [CORES*LANES*8-1:0] row_words,
    // Sums of every core and port.
    output logic write_sums,
    output logic [19:0] sum_at,
    output logic [CORES*PORTS*32-1:0] sums
);
    localparam int ARRAY_CLOCKS = 7 + 4 + 1 + $clog2(LANES / 8) + 1;
    logic [19:0] at, k, word, sum, base, pass;
    wire last_of_sum = word == sum_words - 20'd1;
    wire last_of_pass = at == tile_words - 20'd1;
    wire last = last_of_pass && pass == passes - 20'd1;
    wire step;
    fastcar_stage #(.DEPTH(2 + ARRAY_CLOCKS)) stage (
        .clk, .reset, .go, .tiles, .ready(blocks_ready), .advance(1'b1), .last, .begins, .step, .ends, .busy
    );
    always_ff @(posedge clk) begin
        if (begins) begin
            {at, k, word, sum, base, pass} <= 120'd0;
        end else if (step) begin
            at <= last_of_pass ? 20'd0 : at + 20'd1;
            k <= k == channel_words - 20'd1 ? 20'd0 : k + 20'd1;
            word <= last_of_sum ? 20'd0 : word + 20'd1;
            sum <= sum + 20'(last_of_sum);
            base <= base + (last_of_pass ? 20'(CHANNEL_WORDS) : 20'd0);
            pass <= pass + 20'(last_of_pass);
        end
    end

    wire [PORTS*128-1:0] weights;
    wire [CORES*LANES*8-1:0] inputs;
    for (genvar p = 0; p < PORTS; p++) begin : g_tile
        fastcar_ram #(.BITS(128), .WORDS(2 * TILE_WORDS), .STYLE(TILE_STYLE)) tile (
            .clk, .write(write_tile), .write_at(TILE_BITS'(write_at + (write_copy[0] ? 20'(TILE_WORDS) : 20'd0))),
            .data(words[128*p+:128]), .read_at(TILE_BITS'(at + (read_copy[0] ? 20'(TILE_WORDS) : 20'd0))),
            .found(weights[128*p+:128])
        );
    end
    for (genvar c = 0; c < CORES; c++) begin : g_row
        fastcar_ram #(.BITS(8 * LANES), .WORDS(PASSES * CHANNEL_WORDS + 1)) row (
            .clk, .write(write_row[c]), .write_at(ROW_BITS'(row_at)), .data(row_words[8*LANES*c+:8*LANES]),
            .read_at(ROW_BITS'(base + k)), .found(inputs[8*LANES*c+:8*LANES])
        );
    end
    wire first;
    fastcar_delay #(.BITS(1), .CLOCKS(2)) follow (.clk, .in(word == 20'd0), .out(first));
    fastcar_mac_array #(.PORTS(PORTS), .CORES(CORES), .WEIGHT_BITS(WEIGHT_BITS)) array (
        .clk, .weights, .inputs, .first, .sums
    );
    fastcar_delay #(.BITS(21), .CLOCKS(2 + ARRAY_CLOCKS)) place (
        .clk, .in({step && last_of_sum, sum}), .out({write_sums, sum_at})
    );
endmodule

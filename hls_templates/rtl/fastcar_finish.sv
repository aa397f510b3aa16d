// Process finish_tile of a linear: a channel of every core per clock; four make a word of the result. Channels beyond the
// product's are zero.
module fastcar_finish #(
    parameter int PORTS = 4,
    parameter int CORES = 1,
    parameter int PASSES = 1,
    parameter int TILE = 2,
    parameter int PORT_LANES = 1,
    parameter int PORT_BLOCKS = 4,
    parameter int RESULT_WORDS = 2
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic [19:0] passes,
    input logic [19:0] chunk,
    input logic [19:0] channels,
    input logic blocks_ready,
    output logic begins,
    output logic ends,
    output logic busy,
    // Values, written by the scaler.
    input logic write_values,
    input logic [1:0] write_copy,
    input logic [1:0] read_copy,
    input logic [19:0] value_at,
    input logic [CORES*PORT_LANES*32-1:0] values,
    // Words of the result.
    output logic write_results,
    output logic [19:0] result_at,
    output logic [CORES*128-1:0] results
);
    localparam int VALUES = PASSES * TILE * PORT_BLOCKS, VALUE_BITS = $clog2(2 * VALUES);
    logic [19:0] channel, port, lane, place, pass, base, first;
    wire last_of_row = port == 20'(PORTS - 1);
    wire last_of_block = last_of_row || lane == 20'(PORT_LANES - 1);
    wire last_of_pass = channel == chunk - 20'd1;
    wire step;
    fastcar_stage #(.DEPTH(2)) stage (
        .clk, .reset, .go, .tiles, .ready(blocks_ready), .advance(1'b1), .last(last_of_pass && pass == passes - 20'd1),
        .begins, .step, .ends, .busy
    );
    always_ff @(posedge clk) begin
        if (begins) begin
            channel <= 20'd0;
            port <= 20'd0;
            lane <= 20'd0;
            place <= 20'd0;
            pass <= 20'd0;
            base <= 20'd0;
        end else if (step) begin
            channel <= last_of_pass ? 20'd0 : channel + 20'd1;
            port <= last_of_row ? 20'd0 : port + 20'd1;
            lane <= last_of_block ? 20'd0 : lane + 20'd1;
            place <= place + 20'(last_of_block);
            pass <= pass + 20'(last_of_pass);
            base <= last_of_pass ? base + 20'(RESULT_WORDS) : base;
        end
        if (go) first <= 20'd0;
        else if (ends) first <= first + chunk;
    end
    wire real_channel;
    wire [19:0] lane_word;
    fastcar_delay #(.BITS(21), .CLOCKS(2)) d_lane (.clk, .in({first + channel < channels, lane}), .out({real_channel, lane_word}));
    fastcar_delay #(.BITS(21), .CLOCKS(2)) d_result (
        .clk, .in({step && channel[1:0] == 2'd3, base + channel / 20'd4}), .out({write_results, result_at})
    );
    for (genvar c = 0; c < CORES; c++) begin : g_core
        wire [PORT_LANES*32-1:0] found;
        for (genvar l = 0; l < PORT_LANES; l++) begin : g_lane
            fastcar_ram #(.BITS(32), .WORDS(2 * VALUES)) value (
                .clk, .write(write_values), .write_at(VALUE_BITS'(value_at + (write_copy[0] ? 20'(VALUES) : 20'd0))),
                .data(values[32*(PORT_LANES*c+l)+:32]),
                .read_at(VALUE_BITS'(place + (read_copy[0] ? 20'(VALUES) : 20'd0))), .found(found[32*l+:32])
            );
        end
        logic [31:0] now;
        logic [95:0] earlier;
        always_comb begin
            now = 32'd0;
            for (int l = 0; l < PORT_LANES; l++) if (real_channel && lane_word == 20'(l)) now = found[32*l+:32];
        end
        always_ff @(posedge clk) earlier <= {now, earlier[95:32]};
        assign results[128*c+:128] = {now, earlier};
    end
endmodule

// The MAC array (mac_step of fastcar_mac.hpp): one word of every port by one word of every core and clock. Sums that begin
// with `first` are there LATENCY clocks later.
//
// Two cores share the weights of a port. The last core of an odd number shares its input between two ports, and with an odd
// number of ports too the last product has multipliers of its own.
module fastcar_mac_array #(
    parameter int PORTS = 4,
    parameter int CORES = 1,
    parameter int WEIGHT_BITS = 4,
    localparam int LANES = 128 / WEIGHT_BITS,
    localparam int INPUT_BITS = 8 * LANES
) (
    input logic clk,
    input logic [PORTS*128-1:0] weights,
    input logic [CORES*INPUT_BITS-1:0] inputs,
    input logic first,
    output logic [CORES*PORTS*32-1:0] sums
);
    localparam int PER_SUM = 8;
    // Skew, packing, A, M and P of a slice; the split; a tree over the sums of a word; the accumulator is one more.
    localparam int TO_PRODUCT = PER_SUM - 1 + 4 + 1 + $clog2(LANES / PER_SUM);

    // The lanes of a word as int8, each skewed by its place in its sum of eight.
    wire [PORTS*INPUT_BITS-1:0] weight;
    wire [CORES*INPUT_BITS-1:0] in;
    for (genvar p = 0; p < PORTS; p++) begin : g_port
        for (genvar i = 0; i < LANES; i++) begin : g_lane
            // Of int4 the low nibbles are lanes 0 to 15 and the high ones 16 to 31.
            localparam int FROM = 128 * p + (WEIGHT_BITS == 8 ? 8 * i : 8 * (i % 16) + 4 * (i / 16));
            wire [WEIGHT_BITS-1:0] late;
            fastcar_delay #(.BITS(WEIGHT_BITS), .CLOCKS(i % PER_SUM)) skew (.clk, .in(weights[FROM+:WEIGHT_BITS]), .out(late));
            assign weight[INPUT_BITS*p+8*i+:8] = 8'($signed(late));
        end
    end
    for (genvar c = 0; c < CORES; c++) begin : g_core
        for (genvar i = 0; i < LANES; i++) begin : g_lane
            localparam int FROM = INPUT_BITS * c + 8 * i;
            fastcar_delay #(.BITS(8), .CLOCKS(i % PER_SUM)) skew (.clk, .in(inputs[FROM+:8]), .out(in[FROM+:8]));
        end
    end

    // high * 2^18 + low: the low one lends one to the high one where it is negative.
    function automatic logic [26:0] pack_pair(input logic [7:0] low, input logic [7:0] high);
        pack_pair = {9'($signed(high)) - 9'(low[7]), 18'($signed(low))};
    endfunction

    wire [CORES*PORTS*32-1:0] product;
    for (genvar r = 0; r < CORES / 2; r++) begin : g_rows
        logic [27*LANES-1:0] packed_pair;
        for (genvar i = 0; i < LANES; i++) begin : g_lane
            always_ff @(posedge clk)
                packed_pair[27*i+:27] <= pack_pair(in[INPUT_BITS*2*r+8*i+:8], in[INPUT_BITS*(2*r+1)+8*i+:8]);
        end
        for (genvar p = 0; p < PORTS; p++) begin : g_port
            fastcar_dot_pair #(.LANES(LANES)) dot (
                .clk, .packed_pair, .shared(weight[INPUT_BITS*p+:INPUT_BITS]),
                .low(product[32*(2*r*PORTS+p)+:32]), .high(product[32*((2*r+1)*PORTS+p)+:32])
            );
        end
    end
    if (CORES % 2 == 1) begin : g_last_row
        localparam int ROW = CORES - 1;
        for (genvar p = 0; p < PORTS; p += 2) begin : g_ports
            logic [27*LANES-1:0] packed_pair;
            wire [31:0] high;
            for (genvar i = 0; i < LANES; i++) begin : g_lane
                always_ff @(posedge clk)
                    packed_pair[27*i+:27] <= pack_pair(
                        weight[INPUT_BITS*p+8*i+:8], p + 1 < PORTS ? weight[INPUT_BITS*((p+1)%PORTS)+8*i+:8] : 8'd0);
            end
            fastcar_dot_pair #(.LANES(LANES)) dot (
                .clk, .packed_pair, .shared(in[INPUT_BITS*ROW+:INPUT_BITS]), .low(product[32*(ROW*PORTS+p)+:32]), .high
            );
            if (p + 1 < PORTS) begin : g_second
                assign product[32*(ROW*PORTS+p+1)+:32] = high;
            end
        end
    end

    wire begins;
    fastcar_delay #(.BITS(1), .CLOCKS(TO_PRODUCT)) follow (.clk, .in(first), .out(begins));
    for (genvar n = 0; n < CORES * PORTS; n++) begin : g_sum
        always_ff @(posedge clk) sums[32*n+:32] <= (begins ? 32'd0 : sums[32*n+:32]) + product[32*n+:32];
    end
endmodule

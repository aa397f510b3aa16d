// sum(shared * low) and sum(shared * high) over the lanes of a word, with one multiplier per lane (dot_pair of
// fastcar_mac.hpp). Lanes come skewed: lane i of eight i clocks after lane 0, `packed_pair` one clock after `shared`. So
// the sum of eight goes up a cascade of slices, and no product is added in the fabric.
module fastcar_dot_pair #(
    parameter int LANES = 32
) (
    input logic clk,
    input logic [LANES*27-1:0] packed_pair,
    input logic [LANES*8-1:0] shared,
    output logic [31:0] low,
    output logic [31:0] high
);
    localparam int PER_SUM = 8, SUMS = LANES / PER_SUM, LEVELS = $clog2(SUMS), LOW_BITS = 18;
    // Entry (1 << level) - 1 + i of a tree: sums of the word at its leaves, the whole at entry 0.
    logic signed [LOW_BITS+LEVELS-1:0] lows[0:2*SUMS-2], highs[0:2*SUMS-2];

    for (genvar s = 0; s < SUMS; s++) begin : g_sum
        wire [48*PER_SUM-1:0] cascade, sums;
        for (genvar i = 0; i < PER_SUM; i++) begin : g_slice
            fastcar_mac_slice #(
                .FIRST(i == 0)
            ) slice (
                .clk,
                .packed_pair(packed_pair[27*(PER_SUM*s+i)+:27]),
                .shared({{10{shared[8*(PER_SUM*s+i)+7]}}, shared[8*(PER_SUM*s+i)+:8]}),
                .cascade(i == 0 ? 48'd0 : cascade[48*((i+PER_SUM-1)%PER_SUM)+:48]),
                .to_next(cascade[48*i+:48]),
                .sum(sums[48*i+:48])
            );
        end
        // A negative low sum has borrowed one from the high sum. Both have eighteen bits: 8 * 127 * 128 < 2^17.
        wire signed [LOW_BITS-1:0] low_part = sums[48*(PER_SUM-1)+:LOW_BITS];
        wire signed [LOW_BITS-1:0] high_part = sums[48*(PER_SUM-1)+LOW_BITS+:LOW_BITS] + LOW_BITS'(low_part[LOW_BITS-1]);
        always_ff @(posedge clk) begin
            lows[SUMS-1+s] <= (LOW_BITS + LEVELS)'(low_part);
            highs[SUMS-1+s] <= (LOW_BITS + LEVELS)'(high_part);
        end
    end
    for (genvar n = 0; n < SUMS - 1; n++) begin : g_tree
        always_ff @(posedge clk) begin
            lows[n] <= lows[2*n+1] + lows[2*n+2];
            highs[n] <= highs[2*n+1] + highs[2*n+2];
        end
    end
    assign low = 32'(lows[0]);
    assign high = 32'(highs[0]);
endmodule

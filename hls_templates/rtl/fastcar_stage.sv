// A process of a product: the same loop for every tile. A tile begins when its blocks are there (`ready`); the loop takes a
// step in every clock with `advance`, up to `last`; the tile ends DEPTH clocks later, with the last word written.
module fastcar_stage #(
    parameter int DEPTH = 2
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic ready,
    input logic advance,
    input logic last,
    output logic begins,
    output logic step,
    output logic ends,
    output logic busy
);
    logic [19:0] left;
    logic runs, drains;
    wire done;
    assign begins = left != 0 && ready && !runs && (!drains || done);
    assign step = runs && advance;
    assign ends = done;
    assign busy = left != 0 || runs || drains;
    // A delay of registers without a reset: what it holds when a reset ends has to be gone, which DEPTH clocks of reset do.
    fastcar_delay #(.BITS(1), .CLOCKS(DEPTH)) drain (.clk, .in(step && last && !reset), .out(done));
    always_ff @(posedge clk) begin
        if (begins) runs <= 1'b1;
        else if (step && last) runs <= 1'b0;
        drains <= (step && last) || (drains && !done);
        left <= go ? tiles : left - 20'(begins);
        if (reset) begin
            left <= 20'd0;
            runs <= 1'b0;
            drains <= 1'b0;
        end
    end
endmodule

// x * factor(x) of an activation with a table, 14 clocks later, one a clock (Activate of fastcar_numerics.hpp). The factor is
// linear between the knots, in integers: 16384 steps of the table are LIMIT, 64 of them lie between two knots.
`include "fastcar_rtl_config.svh"
`ifdef FASTCAR_KNOTS
module fastcar_activation #(
    parameter int LIMIT_BITS = `FASTCAR_LIMIT_BITS,  // LIMIT is 1 << LIMIT_BITS
    parameter logic [512*44-1:0] KNOTS = `FASTCAR_KNOTS  // word i: knot i in 25 bits, above it what knot i + 1 has more
) (
    input logic clk,
    input logic [31:0] value,
    output logic [31:0] activated
);
    // A word holds both knots that a value lies between, so that one port of the memory is enough.
    logic [43:0] knots[0:511];
    initial for (int i = 0; i < 512; i++) knots[i] = KNOTS[44*i+:44];

    // 1: |x| in steps. Bit 39 of `moved` has the weight 2^14, that of LIMIT. A NaN may have any factor: the product is
    // a NaN.
    localparam logic [7:0] TOP = 8'(127 + LIMIT_BITS);  // exponent of LIMIT
    logic [14:0] whole1;
    logic half1, rest1, minus1;
    wire [7:0] exponent = value[30:23];
    wire beyond = exponent >= TOP;
    // Below half a step every value is zero: 16 places of the point lie between.
    wire [4:0] down = beyond ? 5'd0 : TOP - exponent > 8'd16 ? 5'd17 : 5'(TOP - exponent);
    wire [39:0] moved = {1'b1, beyond ? 23'd0 : value[22:0], 16'd0} >> down;
    always_ff @(posedge clk) begin
        whole1 <= moved[39:25];
        half1 <= moved[24];
        rest1 <= moved[23:0] != 0;
        minus1 <= value[31];
    end

    // 2: steps from -LIMIT on, round half to even. The last knot is the end of word 511.
    wire [15:0] near = {1'b0, whole1} + 16'(half1 && (rest1 || whole1[0]));
    wire [15:0] fixed = minus1 ? 16'd16384 - near : 16'd16384 + near;
    logic [8:0] index2;
    logic [6:0] fraction2;
    always_ff @(posedge clk) begin
        index2 <= fixed[15] ? 9'd511 : fixed[14:6];
        fraction2 <= {fixed[15], fixed[15] ? 6'd0 : fixed[5:0]};
    end

    // 3 and 4: the knots, with the output register of a block RAM.
    logic [43:0] found3, found4;
    logic [6:0] fraction3, fraction4;
    always_ff @(posedge clk) begin
        found3 <= knots[index2];
        found4 <= found3;
        fraction3 <= fraction2;
        fraction4 <= fraction3;
    end

    // 5 and 6: between them.
    logic signed [26:0] part5;
    logic [24:0] knot5, sum6;
    wire signed [18:0] rise = found4[43:25];
    wire signed [7:0] weight = {1'b0, fraction4};
    wire signed [26:0] near_knot = (part5 + 27'sd32) >>> 6;
    always_ff @(posedge clk) begin
        part5 <= rise * weight;
        knot5 <= found4[24:0];
        sum6 <= knot5 + near_knot[24:0];
    end

    // 7 to 10: as float32, 2^24 times the factor. 11 to 14: the product. The factor's exponent is never too small.
    logic [31:0] number, late;
    fastcar_float_of_int convert (.clk, .value({7'd0, sum6}), .number);
    fastcar_delay #(.BITS(32), .CLOCKS(10)) d_value (.clk, .in(value), .out(late));
    wire [31:0] factor = number == 0 ? 32'd0 : number - {1'b0, 8'd24, 23'd0};
    fastcar_float_multiply multiply (.clk, .left(late), .right(factor), .product(activated));
endmodule
`else
// ReLU, or its square, as late.
module fastcar_activation (
    input logic clk,
    input logic [31:0] value,
    output logic [31:0] activated
);
    wire [31:0] positive = value[31] || value[30:0] > 31'h7F800000 ? 32'd0 : value;
    wire [31:0] late;
    fastcar_delay #(.BITS(32), .CLOCKS(10)) delay (.clk, .in(positive), .out(late));
    if (`FASTCAR_SQUARED) begin : g_square
        fastcar_float_multiply multiply (.clk, .left(late), .right(late), .product(activated));
    end else begin : g_relu
        fastcar_delay #(.BITS(32), .CLOCKS(4)) rest (.clk, .in(late), .out(activated));
    end
endmodule
`endif

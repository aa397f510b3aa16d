// float32 product, four clocks later, one a clock: IEEE 754, round to nearest even, subnormal numbers as they are. A NaN is
// 7FC00000.
//
// Mantissas are multiplied as they are; the product then moves up by the leading zeros of a subnormal factor, but not below
// exponent 1. There is one such factor at most: the product of two is less than half of the smallest number.
module fastcar_float_multiply (
    input logic clk,
    input logic [31:0] left,
    input logic [31:0] right,
    output logic [31:0] product
);
    // 1: two parts of the product, the sum of the exponents, and the bits about the leading one of a subnormal factor.
    logic [40:0] low1;
    logic [30:0] high1;
    logic [8:0] exponents1;
    logic [3:1] three1;
    logic [2:0] which1;
    logic nan1, infinite1, zero1;
    wire left_top = left[30:23] != 0, right_top = right[30:23] != 0;
    wire left_special = &left[30:23], right_special = &right[30:23];
    wire left_zero = left[30:0] == 0, right_zero = right[30:0] == 0;
    wire [23:0] least = left_top ? {right_top, right[22:0]} : {1'b0, left[22:0]};
    logic [2:0] which;
    always_comb begin
        which = 3'd0;
        for (int n = 1; n < 6; n++) if (least[4*n+:4] != 0) which = 3'(n);
    end
    always_ff @(posedge clk) begin
        low1 <= {left_top, left[22:0]} * right[16:0];
        high1 <= {left_top, left[22:0]} * {right_top, right[22:17]};
        exponents1 <= 9'(left[30:23]) + 9'(right[30:23]) + 9'(!(left_top && right_top));
        which1 <= which;
        three1 <= least[4*which+1+:3];
        nan1 <= (left_special && left[22:0] != 0) || (right_special && right[22:0] != 0) ||
                (left_special && right_zero) || (right_special && left_zero);
        infinite1 <= left_special || right_special;
        zero1 <= left_zero || right_zero;
    end

    // 2: the product, and how far it moves down from two bits above: the bits of the factor, or what exponent 1 takes.
    logic [47:0] m2;
    logic [8:0] exponents2;
    logic [5:0] down2;
    logic above2, zero2;
    wire [4:0] bits = {which1, 2'd0} + (three1[3] ? 5'd4 : three1[2] ? 5'd3 : three1[1] ? 5'd2 : 5'd1);
    wire signed [9:0] needed = 10'sd151 - $signed({1'b0, exponents1});
    wire above = $signed({5'd0, bits}) > needed;
    always_ff @(posedge clk) begin
        m2 <= 48'(low1) + {high1, 17'd0};
        exponents2 <= exponents1;
        down2 <= above ? 6'(bits) : needed[5:0];
        above2 <= above;
        zero2 <= zero1 || needed > 10'sd49;
    end

    // 3: its place. Behind the 26 bits it only has to be known whether there is anything.
    logic [25:0] m3;
    logic [9:0] below3;
    logic rest3, above3;
    wire sign3, nan3, infinite3, zero3;
    fastcar_delay #(.BITS(1), .CLOCKS(3)) d_sign (.clk, .in(left[31] ^ right[31]), .out(sign3));
    fastcar_delay #(.BITS(2), .CLOCKS(2)) d_special (.clk, .in({nan1, infinite1}), .out({nan3, infinite3}));
    fastcar_delay #(.BITS(1), .CLOCKS(1)) d_zero (.clk, .in(zero2), .out(zero3));
    wire [49:0] moving = {m2, 2'd0};
    logic [49:0] behind;
    always_comb for (int n = 0; n < 50; n++) behind[n] = moving[n] && down2 > 6'(n);
    always_ff @(posedge clk) begin
        m3 <= 26'(moving >> down2);
        rest3 <= |behind;
        below3 <= 10'(exponents2) + 10'(down2) - 10'd151;
        above3 <= above2;
    end

    // 4: rounding. The leading bit, or above exponent 1 the next one, counts the exponent up, and so does a carry out of the
    // mantissa, to that of infinity too.
    wire top = m3[25], one_up = !top && above3;
    wire up = one_up ? m3[0] && (rest3 || m3[1]) : m3[1] && (m3[0] || rest3 || m3[2]);
    wire [30:0] rounded = {below3[7:0], 23'd0} + {7'd0, top, one_up ? m3[23:1] : m3[24:2]} + 31'(up);
    wire too_large = infinite3 || below3 >= 10'd255 || (below3 == 10'd254 && top);
    always_ff @(posedge clk) begin
        product <= nan3 ? 32'h7FC00000 : {sign3, zero3 ? 31'd0 : too_large ? {8'd255, 23'd0} : rounded};
    end
endmodule

// float32 product, four clocks later, one a clock: IEEE 754, round to nearest even, subnormal numbers as they are. A NaN is
// 7FC00000.
//
// A subnormal factor is brought to its leading bit before the multiplication. There is one at most: the product of two is less
// than half of the smallest number. A subnormal product moves to its place behind the multiplication.
module fastcar_float_multiply (
    input logic clk,
    input logic [31:0] left,
    input logic [31:0] right,
    output logic [31:0] product
);
    // 1: the mantissas with their leading bits, and the exponent of a product whose leading bit is bit 47.
    logic [23:0] large1, small1;
    logic signed [9:0] exponent1;
    logic sign1, nan1, infinite1, zero1;
    wire left_top = left[30:23] != 0, right_top = right[30:23] != 0;
    wire left_special = &left[30:23], right_special = &right[30:23];
    wire left_zero = left[30:0] == 0, right_zero = right[30:0] == 0;
    logic [23:0] least;
    logic [4:0] lead;
    always_comb begin
        least = left_top ? {right_top, right[22:0]} : {1'b0, left[22:0]};
        for (int n = 4; n >= 0; n--) begin
            lead[n] = least >> (24 - (1 << n)) == 0;
            if (lead[n]) least = least << (1 << n);
        end
    end
    always_ff @(posedge clk) begin
        large1 <= {1'b1, left_top ? left[22:0] : right[22:0]};
        small1 <= least;
        exponent1 <= 10'(left[30:23]) + 10'(right[30:23]) - 10'(lead) + 10'(!(left_top && right_top)) - 10'd126;
        sign1 <= left[31] ^ right[31];
        nan1 <= (left_special && left[22:0] != 0) || (right_special && right[22:0] != 0) ||
                (left_special && right_zero) || (right_special && left_zero);
        infinite1 <= left_special || right_special;
        zero1 <= !left_top && !right_top || left_zero || right_zero;
    end

    // 2: the product, and how far below its place it is where its exponent is too small.
    logic [47:0] m2;
    logic signed [9:0] exponent2;
    logic [4:0] down2;
    wire signed [9:0] under = 10'sd1 - exponent1;
    always_ff @(posedge clk) begin
        m2 <= large1 * small1;
        exponent2 <= under > 10'sd0 ? 10'sd1 : exponent1;
        down2 <= under <= 10'sd0 ? 5'd0 : under > 10'sd26 ? 5'd26 : 5'(under);
    end

    // 3: its place, one further up where the leading bit is bit 46. What is behind 26 bits only has to be known to be there.
    logic [22:0] m3;
    logic [9:0] exponent3;
    logic half3, rest3;
    wire sign3, nan3, infinite3, zero3;
    fastcar_delay #(.BITS(4), .CLOCKS(2)) d_kind (.clk, .in({sign1, nan1, infinite1, zero1}), .out({sign3, nan3, infinite3, zero3}));
    wire up_one = !m2[47] && exponent2 > 10'sd1;
    wire [26:0] head = up_one ? {m2[46:21], |m2[20:0]} : {m2[47:22], |m2[21:0]};
    wire [52:0] placed = {head, 26'd0} >> down2;
    always_ff @(posedge clk) begin
        m3 <= placed[51:29];
        half3 <= placed[28];
        rest3 <= |placed[27:0];
        // A number without a leading bit has exponent 0.
        exponent3 <= up_one ? exponent2 - 10'sd1 : placed[52] ? exponent2 : 10'sd0;
    end

    // 4: rounding; a carry out of the mantissa counts the exponent up.
    wire up = half3 && (rest3 || m3[0]);
    wire [32:0] rounded = {exponent3, m3} + 33'(up);
    wire too_large = infinite3 || rounded[32:23] >= 10'd255;
    always_ff @(posedge clk) begin
        product <= nan3 ? 32'h7FC00000 : too_large ? {sign3, 8'd255, 23'd0} : {sign3, zero3 ? 31'd0 : rounded[30:0]};
    end
endmodule

// float32 sum, six clocks later, one a clock: IEEE 754, round to nearest even, subnormal numbers as they are. A NaN is
// 7FC00000. Adding -0 changes nothing, not even the sign of a zero.
module fastcar_float_add (
    input logic clk,
    input logic [31:0] left,
    input logic [31:0] right,
    output logic [31:0] sum
);
    // 1: the larger operand comes first, and how far apart the exponents are: either way, so that the comparison takes no time.
    logic [31:0] large1, small1;
    logic [4:0] distance1;
    logic far1, nan1, infinite1;
    wire swap = right[30:0] > left[30:0];
    wire [7:0] left_exponent = left[30:23] | 8'(left[30:23] == 0), right_exponent = right[30:23] | 8'(right[30:23] == 0);
    wire [8:0] over = 9'(left_exponent) - 9'(right_exponent);
    wire [7:0] under = right_exponent - left_exponent;
    wire left_special = &left[30:23], right_special = &right[30:23];
    always_ff @(posedge clk) begin
        large1 <= swap ? right : left;
        small1 <= swap ? left : right;
        distance1 <= over[8] ? under[4:0] : over[4:0];
        far1 <= over[8] ? |under[7:5] : |over[7:5];
        nan1 <= (left_special && left[22:0] != 0) || (right_special && right[22:0] != 0) ||
                (left_special && right_special && left[31] != right[31]);
        infinite1 <= left_special || right_special;
    end

    // 2: the smaller one moves to the exponent of the larger. Three more bits: two of them, and whether anything is behind.
    logic [26:0] large2, small2;
    logic [7:0] exponent2;
    logic sign2, subtract2;
    wire large_top = large1[30:23] != 0, small_top = small1[30:23] != 0;
    wire [25:0] moving = {small_top, small1[22:0], 2'd0};
    logic [25:0] behind;
    always_comb for (int n = 0; n < 26; n++) behind[n] = moving[n] && (far1 || distance1 > 5'(n));
    always_ff @(posedge clk) begin
        large2 <= {large_top, large1[22:0], 3'd0};
        small2 <= {far1 ? 26'd0 : moving >> distance1, |behind};
        exponent2 <= large1[30:23] | 8'(!large_top);
        sign2 <= large1[31];
        subtract2 <= large1[31] ^ small1[31];
    end

    // 3: the sum, which is never negative, and the place from which a leading bit would come below exponent 1.
    logic [27:0] m3;
    logic [26:0] limit3;
    logic sign3, subtract3;
    always_ff @(posedge clk) begin
        m3 <= subtract2 ? 28'(large2) - 28'(small2) : 28'(large2) + 28'(small2);
        limit3 <= 27'(28'h8000000 >> exponent2);
        sign3 <= sign2;
        subtract3 <= subtract2;
    end

    // 4: how far it moves up: by its leading zeros, but not below exponent 1. Four bits at a time.
    logic [27:0] m4;
    wire [7:0] exponent4;
    logic [4:0] lead, shift4;
    logic sign4;
    wire nan4, infinite4;
    fastcar_delay #(.BITS(8), .CLOCKS(2)) d_exponent (.clk, .in(exponent2), .out(exponent4));
    fastcar_delay #(.BITS(2), .CLOCKS(3)) d_special (.clk, .in({nan1, infinite1}), .out({nan4, infinite4}));
    wire [27:0] leading = {m3[26:0] | limit3, 1'b1};
    always_comb begin
        lead = 5'd0;
        for (int n = 0; n < 7; n++) begin
            if (leading[4*n+:4] != 0) begin
                lead = {3'(6 - n), leading[4*n+2+:2] == 0, !leading[4*n+3] && (leading[4*n+2] || !leading[4*n+1])};
            end
        end
    end
    always_ff @(posedge clk) begin
        m4 <= m3;
        shift4 <= lead;
        sign4 <= m3 == 0 && subtract3 ? 1'b0 : sign3;
    end

    // 5: its place.
    logic [23:0] m5;
    logic [7:0] exponent5;
    logic half5, rest5, sign5, nan5, infinite5;
    wire [26:0] placed = m4[27] ? {m4[27:2], |m4[1:0]} : m4[26:0] << shift4;
    always_ff @(posedge clk) begin
        m5 <= placed[26:3];
        half5 <= placed[2];
        rest5 <= |placed[1:0];
        exponent5 <= m4[27] ? exponent4 + 8'd1 : placed[26] ? exponent4 - 8'(shift4) : 8'd0;
        sign5 <= sign4;
        nan5 <= nan4;
        infinite5 <= infinite4 || (m4[27] && exponent4 == 8'd254);
    end

    // 6: rounding; a carry out of the mantissa counts the exponent up, to that of infinity too.
    wire up = half5 && (rest5 || m5[0]);
    wire [30:0] rounded = {exponent5, m5[22:0]} + 31'(up);
    always_ff @(posedge clk) begin
        sum <= nan5 ? 32'h7FC00000 : {sign5, infinite5 ? {8'd255, 23'd0} : rounded};
    end
endmodule

// float32 sum, six clocks later, one a clock: IEEE 754, round to nearest even, subnormal numbers as they are. A NaN is
// 7FC00000. Adding -0 changes nothing, not even the sign of a zero.
module fastcar_float_add (
    input logic clk,
    input logic [31:0] left,
    input logic [31:0] right,
    output logic [31:0] sum
);
    // 1: the larger operand comes first.
    logic [31:0] large1, small1;
    logic nan1, infinite1;
    wire swap = right[30:0] > left[30:0];
    wire left_special = &left[30:23], right_special = &right[30:23];
    always_ff @(posedge clk) begin
        large1 <= swap ? right : left;
        small1 <= swap ? left : right;
        nan1 <= (left_special && left[22:0] != 0) || (right_special && right[22:0] != 0) ||
                (left_special && right_special && left[31] != right[31]);
        infinite1 <= left_special || right_special;
    end

    // 2: the smaller one moves to the exponent of the larger. Three more bits: two of them, and whether anything is behind.
    logic [26:0] large2, small2;
    logic [7:0] exponent2;
    logic sign2, subtract2, nan2, infinite2;
    wire large_top = large1[30:23] != 0, small_top = small1[30:23] != 0;
    wire [7:0] large_exponent = large1[30:23] | 8'(!large_top), small_exponent = small1[30:23] | 8'(!small_top);
    wire [7:0] distance = large_exponent - small_exponent;
    wire [4:0] shift = distance > 8'd26 ? 5'd26 : 5'(distance);
    wire [51:0] moved = {small_top, small1[22:0], 28'd0} >> shift;
    always_ff @(posedge clk) begin
        large2 <= {large_top, large1[22:0], 3'd0};
        small2 <= {moved[51:26], |moved[25:0]};
        exponent2 <= large_exponent;
        sign2 <= large1[31];
        subtract2 <= large1[31] ^ small1[31];
        nan2 <= nan1;
        infinite2 <= infinite1;
    end

    // 3: the sum, which is never negative.
    logic [27:0] m3;
    logic [7:0] exponent3;
    logic sign3, subtract3, nan3, infinite3;
    always_ff @(posedge clk) begin
        m3 <= subtract2 ? 28'(large2) - 28'(small2) : 28'(large2) + 28'(small2);
        exponent3 <= exponent2;
        sign3 <= sign2;
        subtract3 <= subtract2;
        nan3 <= nan2;
        infinite3 <= infinite2;
    end

    // 4: how far it moves up: by its leading zeros, but not below exponent 1.
    logic [27:0] m4;
    logic [7:0] exponent4;
    logic [4:0] shift4;
    logic sign4, nan4, infinite4;
    logic [31:0] left_over;
    logic [4:0] lead;
    always_comb begin
        left_over = {m3[26:0], 5'b11111};
        for (int n = 4; n >= 0; n--) begin
            lead[n] = left_over >> (32 - (1 << n)) == 0;
            if (lead[n]) left_over = left_over << (1 << n);
        end
    end
    always_ff @(posedge clk) begin
        m4 <= m3;
        exponent4 <= exponent3;
        shift4 <= m3[27] ? 5'd0 : 8'(lead) < exponent3 ? lead : 5'(exponent3 - 8'd1);
        sign4 <= m3 == 0 && subtract3 ? 1'b0 : sign3;
        nan4 <= nan3;
        infinite4 <= infinite3;
    end

    // 5: its place.
    logic [23:0] m5;
    logic [8:0] exponent5;
    logic half5, rest5, sign5, nan5, infinite5;
    wire [26:0] placed = m4[27] ? {m4[27:2], |m4[1:0]} : m4[26:0] << shift4;
    always_ff @(posedge clk) begin
        m5 <= placed[26:3];
        half5 <= placed[2];
        rest5 <= |placed[1:0];
        exponent5 <= m4[27] ? 9'(exponent4) + 9'd1 : placed[26] ? 9'(exponent4) - 9'(shift4) : 9'd0;
        sign5 <= sign4;
        nan5 <= nan4;
        infinite5 <= infinite4;
    end

    // 6: rounding; a carry out of the mantissa counts the exponent up.
    wire up = half5 && (rest5 || m5[0]);
    wire [31:0] rounded = {exponent5, m5[22:0]} + 32'(up);
    wire too_large = infinite5 || rounded[31:23] >= 9'd255;
    always_ff @(posedge clk) begin
        sum <= nan5 ? 32'h7FC00000 : too_large ? {sign5, 8'd255, 23'd0} : {sign5, rounded[30:0]};
    end
endmodule

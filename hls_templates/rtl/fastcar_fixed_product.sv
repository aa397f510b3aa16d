// Product of two float32 values in units of 2^-24, five clocks later, one a clock: rounded half to even, limited to 2^46. An
// infinity or a NaN gives -2^46 (fixed_product of fastcar_tas_core.hpp).
module fastcar_fixed_product (
    input logic clk,
    input logic [31:0] left,
    input logic [31:0] right,
    output logic signed [47:0] product
);
    localparam int LIMIT = 46;  // bits before the point
    localparam int BELOW = 50;  // a product of 48 bits that goes further down than this is zero
    localparam logic signed [9:0] EXPONENT_OF_UNIT = 10'sd276;

    // 1: the mantissas, and the place of the product's last bit. It goes up by LIMIT at most, which any size but zero fills.
    logic [23:0] left1, right1;
    logic [6:0] place1, place2;
    logic [3:1] negative, finite;
    wire left_normal = left[30:23] != 0, right_normal = right[30:23] != 0;
    wire signed [9:0] shift = 10'(left[30:23]) + 10'(right[30:23]) + 10'(!left_normal) + 10'(!right_normal) - EXPONENT_OF_UNIT;
    always_ff @(posedge clk) begin
        left1 <= {left_normal, left[22:0]};
        right1 <= {right_normal, right[22:0]};
        place1 <= 7'(shift < -10'sd50 ? 10'sd0 : shift > 10'sd46 ? 10'sd96 : shift + 10'sd50);
        negative <= {negative[2:1], left[31] ^ right[31]};
        finite <= {finite[2:1], !(&left[30:23] || &right[30:23])};
    end

    // 2: the product. 3: at its place.
    logic [47:0] product2;
    logic [47+LIMIT+BELOW:0] placed3;
    always_ff @(posedge clk) begin
        product2 <= left1 * right1;
        place2 <= place1;
        placed3 <= (48 + LIMIT + BELOW)'(product2) << place2;
    end

    // 4: rounded and limited. 5: the sign.
    logic [LIMIT:0] size4;
    logic negative4;
    wire up = placed3[BELOW-1] && (|placed3[BELOW-2:0] || placed3[BELOW]);
    wire [LIMIT:0] rounded = {1'b0, placed3[BELOW+:LIMIT]} + {{LIMIT{1'b0}}, up};
    wire over = |placed3[47+LIMIT+BELOW:LIMIT+BELOW];
    always_ff @(posedge clk) begin
        size4 <= over || !finite[3] ? {1'b1, {LIMIT{1'b0}}} : rounded;
        negative4 <= negative[3] || !finite[3];
        product <= negative4 ? -{1'b0, size4} : {1'b0, size4};
    end
endmodule

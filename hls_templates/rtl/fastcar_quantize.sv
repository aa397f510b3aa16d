// A float32 value times the inverse scale of its row -> int8, six clocks later, one a clock: within 127, round half to even;
// a NaN is 127 (quantize of fastcar_numerics.hpp).
module fastcar_quantize (
    input logic clk,
    input logic [31:0] value,
    input logic [31:0] inverse,
    output logic [7:0] rounded
);
    logic [31:0] scaled;
    fastcar_float_multiply multiply (.clk, .left(value), .right(inverse), .product(scaled));

    logic [7:0] whole;
    logic half, behind, sign, most;
    wire nan = &scaled[30:23] && scaled[22:0] != 0;
    wire [7:0] exponent = scaled[30:23];
    // From 2^7 on every value is clamped, below 2^-1 every value is zero: eight places of the point lie between.
    wire [4:0] down = exponent >= 8'd134 ? 5'd0 : exponent < 8'd125 ? 5'd9 : 5'(8'd134 - exponent);
    wire [33:0] moved = {1'b1, scaled[22:0], 10'd0} >> down;
    // Bit 33 has the weight 2^7.
    always_ff @(posedge clk) begin
        whole <= moved[33:26];
        half <= moved[25];
        behind <= moved[24:0] != 0;
        sign <= scaled[31] && !nan;
        most <= exponent >= 8'd134;
        rounded <= clamped(whole, half, behind, sign, most);
    end

    function automatic logic [7:0] clamped(
        input logic [7:0] size, input logic above, input logic rest, input logic negative, input logic beyond
    );
        logic [7:0] near;
        near = size + 8'(above && (rest || size[0]));
        near = beyond || near > 8'd127 ? 8'd127 : near;
        clamped = negative ? -near : near;
    endfunction
endmodule

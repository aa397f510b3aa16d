// The units of the engine side by side, for units.cpp.
module units #(
    parameter int PORTS = 4,
    parameter int CORES = 1,
    parameter int WEIGHT_BITS = 4
) (
    input logic clk,
    input logic [31:0] left,
    input logic [31:0] right,
    input logic [31:0] size,
    output logic [31:0] product,
    output logic [31:0] sum,
    output logic [31:0] number,
    output logic [31:0] inverse,
    output logic [7:0] rounded,
    output logic [31:0] activated,
    input logic [PORTS*128-1:0] weights,
    input logic [CORES*1024/WEIGHT_BITS-1:0] inputs,
    input logic first,
    output logic [CORES*PORTS*32-1:0] sums
);
    fastcar_float_multiply multiply (.clk, .left, .right, .product);
    fastcar_float_add add (.clk, .left, .right, .sum);
    fastcar_float_of_int convert (.clk, .value(left), .number);
    fastcar_inverse_scale divide (.clk, .size, .inverse);
    fastcar_quantize quantize (.clk, .value(left), .inverse(right), .rounded);
    fastcar_activation activate (.clk, .value(left), .activated);
    fastcar_mac_array #(.PORTS(PORTS), .CORES(CORES), .WEIGHT_BITS(WEIGHT_BITS)) array (
        .clk, .weights, .inputs, .first, .sums
    );
endmodule

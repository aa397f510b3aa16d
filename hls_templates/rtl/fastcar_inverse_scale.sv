// 127 / size in float32, sixteen clocks later, one a clock; round to nearest even. size: at least 1e-30, or infinite.
// The quotient of the mantissas is in (0.99, 1.99): 26 bits of it and the rest decide the rounding, two bits a clock.
module fastcar_inverse_scale (
    input logic clk,
    input logic [31:0] size,
    output logic [31:0] inverse
);
    localparam int STAGES = 13;
    logic [24:0] rest[0:STAGES];
    logic [23:0] divisor[0:STAGES];
    logic [25:0] quotient[0:STAGES];
    logic [7:0] exponent[0:STAGES];

    always_ff @(posedge clk) begin
        rest[0] <= 25'h0FE0000;  // 127 * 2^17
        divisor[0] <= {1'b1, size[22:0]};
        quotient[0] <= 26'd0;
        exponent[0] <= size[30:23];
    end
    for (genvar i = 0; i < STAGES; i++) begin : g_bits
        wire [25:0] one = {1'b0, rest[i]} - 26'(divisor[i]);
        wire [24:0] doubled = {one[25] ? rest[i][23:0] : one[23:0], 1'b0};
        wire [25:0] two = {1'b0, doubled} - 26'(divisor[i]);
        wire [23:0] last = two[25] ? doubled[23:0] : two[23:0];
        always_ff @(posedge clk) begin
            rest[i+1] <= {last, 1'b0};
            divisor[i+1] <= divisor[i];
            quotient[i+1] <= {quotient[i][23:0], !one[25], !two[25]};
            exponent[i+1] <= exponent[i];
        end
    end

    logic [23:0] mantissa;
    logic half, behind, zero;
    logic [7:0] place;
    wire [25:0] found = quotient[STAGES];
    wire up = half && (behind || mantissa[0]);
    wire [30:0] rounded = {place, mantissa[22:0]} + 31'(up);
    always_ff @(posedge clk) begin
        // 133 is the exponent of 127; a quotient below one has its leading bit one further down.
        place <= 8'(9'd260 - 9'(exponent[STAGES])) - 8'(!found[25]);
        mantissa <= found[25] ? found[25:2] : found[24:1];
        half <= found[25] ? found[1] : found[0];
        behind <= rest[STAGES] != 0 || (found[25] && found[0]);
        zero <= &exponent[STAGES];
        inverse <= zero ? 32'd0 : {1'b0, rounded};
    end
endmodule

// Integer -> float32, four clocks later, one a clock; round to nearest even.
module fastcar_float_of_int #(
    parameter int BITS = 32,
    localparam int LEAD = $clog2(BITS)
) (
    input logic clk,
    input logic [BITS-1:0] value,
    output logic [31:0] number
);
    // 1: the size. 2 and 3: its leading bit moves to the top, by multiples of eight, then by less.
    logic [BITS-1:0] size1, size2, size3, coarse, fine;
    logic [LEAD-1:3] lead2;
    logic [LEAD-1:0] lead3, lead;
    logic sign1, sign2, sign3;
    always_comb begin
        coarse = size1;
        lead = LEAD'(0);
        for (int n = LEAD - 1; n >= 3; n--) begin
            lead[n] = coarse >> (BITS - (1 << n)) == 0;
            if (lead[n]) coarse = coarse << (1 << n);
        end
        fine = size2;
        for (int n = 2; n >= 0; n--) begin
            lead[n] = fine >> (BITS - (1 << n)) == 0;
            if (lead[n]) fine = fine << (1 << n);
        end
    end
    // 126 + BITS: the exponent of a number whose leading bit is the top one.
    wire up = size3[BITS-25] && (size3[BITS-26:0] != 0 || size3[BITS-24]);
    wire [30:0] rounded = {8'(126 + BITS) - 8'(lead3), size3[BITS-2-:23]} + 31'(up);
    always_ff @(posedge clk) begin
        size1 <= value[BITS-1] ? -value : value;
        sign1 <= value[BITS-1];
        size2 <= coarse;
        lead2 <= lead[LEAD-1:3];
        sign2 <= sign1;
        size3 <= fine;
        lead3 <= {lead2, lead[2:0]};
        sign3 <= sign2;
        number <= size3[BITS-1] ? {sign3, rounded} : 32'd0;
    end
endmodule

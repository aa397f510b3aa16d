// int32 -> float32, four clocks later, one a clock; round to nearest even.
module fastcar_float_of_int (
    input logic clk,
    input logic [31:0] value,
    output logic [31:0] number
);
    // 1: the size. 2 and 3: its leading bit moves to bit 31, by 16 and 8, then by less.
    logic [31:0] size1, size2, size3, coarse, fine;
    logic [1:0] lead2;
    logic [4:0] lead3, lead;
    logic sign1, sign2, sign3;
    always_comb begin
        coarse = size1;
        lead = 5'd0;
        for (int n = 4; n >= 3; n--) begin
            lead[n] = coarse >> (32 - (1 << n)) == 0;
            if (lead[n]) coarse = coarse << (1 << n);
        end
        fine = size2;
        for (int n = 2; n >= 0; n--) begin
            lead[n] = fine >> (32 - (1 << n)) == 0;
            if (lead[n]) fine = fine << (1 << n);
        end
    end
    // 158: the exponent of a number whose leading bit is bit 31.
    wire up = size3[7] && (size3[6:0] != 0 || size3[8]);
    wire [30:0] rounded = {8'd158 - 8'(lead3), size3[30:8]} + 31'(up);
    always_ff @(posedge clk) begin
        size1 <= value[31] ? -value : value;
        sign1 <= value[31];
        size2 <= coarse;
        lead2 <= lead[4:3];
        sign2 <= sign1;
        size3 <= fine;
        lead3 <= {lead2, lead[2:0]};
        sign3 <= sign2;
        number <= size3[31] ? {sign3, rounded} : 32'd0;
    end
endmodule

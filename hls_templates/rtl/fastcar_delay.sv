// A bus, CLOCKS clocks later; 0: a wire. Longer ones become shift registers in LUTs.
module fastcar_delay #(
    parameter int BITS = 1,
    parameter int CLOCKS = 1
) (
    input logic clk,
    input logic [BITS-1:0] in,
    output logic [BITS-1:0] out
);
    if (CLOCKS == 0) begin : g_wire
        assign out = in;
    end else begin : g_registers
        logic [BITS-1:0] stage[0:CLOCKS-1];
        always_ff @(posedge clk) begin
            stage[0] <= in;
            for (int i = 1; i < CLOCKS; i++) stage[i] <= stage[i-1];
        end
        assign out = stage[CLOCKS-1];
    end
endmodule

// A memory with a write port and a read port. A word read is there LATENCY clocks after its place; 2: with the output register
// of a block RAM. A word written is found by reads of later clocks.
module fastcar_ram #(
    parameter int BITS = 32,
    parameter int WORDS = 16,
    parameter int LATENCY = 2,
    // verilator lint_off UNUSEDPARAM
    parameter STYLE = "auto",  // "ultra": UltraRAM; for synthesis only
    // verilator lint_on UNUSEDPARAM
    localparam int PLACE_BITS = WORDS > 1 ? $clog2(WORDS) : 1
) (
    input logic clk,
    input logic write,
    input logic [PLACE_BITS-1:0] write_at,
    input logic [BITS-1:0] data,
    input logic [PLACE_BITS-1:0] read_at,
    output logic [BITS-1:0] found
);
    (* ram_style = STYLE *) logic [BITS-1:0] memory[0:WORDS-1];
    logic [BITS-1:0] word;
    always_ff @(posedge clk) begin
        if (write) memory[write_at] <= data;
        word <= memory[read_at];
    end
    fastcar_delay #(.BITS(BITS), .CLOCKS(LATENCY - 1)) register (.clk, .in(word), .out(found));
endmodule

// A FIFO of WORDS words besides the one at its output, which comes two clocks after it was put into an empty one.
module fastcar_fifo #(
    parameter int BITS = 128,
    parameter int WORDS = 16
) (
    input logic clk,
    input logic reset,
    input logic put,
    input logic [BITS-1:0] in,
    output logic [$clog2(WORDS+1)-1:0] count,
    output logic valid,
    input logic taken,
    output logic [BITS-1:0] out
);
    localparam int PLACE_BITS = $clog2(WORDS);
    logic [BITS-1:0] memory[0:WORDS-1];
    logic [PLACE_BITS-1:0] put_at, take_at;
    wire moves = count != 0 && (!valid || taken);
    always_ff @(posedge clk) begin
        if (put) memory[put_at] <= in;
        if (moves) out <= memory[take_at];
        if (put) put_at <= put_at == PLACE_BITS'(WORDS - 1) ? 0 : put_at + 1'b1;
        if (moves) take_at <= take_at == PLACE_BITS'(WORDS - 1) ? 0 : take_at + 1'b1;
        valid <= moves || (valid && !taken);
        count <= count + $bits(count)'(put) - $bits(count)'(moves);
        if (reset) begin
            put_at <= 0;
            take_at <= 0;
            count <= 0;
            valid <= 1'b0;
        end
    end
endmodule

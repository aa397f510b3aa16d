// An AXI4 write master: requests of runs of words, whose data come as a stream. Bursts end at 4 KiB and have at most BURST beats; OUTSTANDING
// of them wait for their answer at most.
module fastcar_axi_write #(
    parameter int BURST = 64,
    parameter int OUTSTANDING = 8
) (
    input logic clk,
    input logic reset,
    input logic request,
    output logic accepts,
    input logic [63:0] address,  // of a whole word
    input logic [19:0] words,
    output logic idle,
    input logic valid,
    output logic taken,
    input logic [127:0] data,
    output logic aw_valid,
    input logic aw_ready,
    output logic [63:0] aw_address,
    output logic [7:0] aw_length,
    output logic w_valid,
    input logic w_ready,
    output logic [127:0] w_data,
    output logic w_last,
    input logic b_valid,
    output logic b_ready
);
    logic [63:0] next;
    logic [19:0] left;
    logic [8:0] beats;  // of the burst that are not sent
    logic [3:0] under_way;
    wire [8:0] to_page = 9'd256 - 9'(next[11:4]);
    wire [8:0] most = to_page < 9'(BURST) ? to_page : 9'(BURST);
    wire [8:0] burst = left < 20'(most) ? left[8:0] : most;
    wire sends = w_valid && w_ready;
    // The next burst is asked for while the last word of this one leaves.
    wire asks = left != 0 && !aw_valid && (beats == 0 || (sends && w_last)) && under_way < 4'(OUTSTANDING);
    assign accepts = left == 0;
    assign idle = left == 0 && beats == 0 && under_way == 0 && !aw_valid;
    assign w_valid = beats != 0 && valid;
    assign w_data = data;
    assign w_last = beats == 9'd1;
    assign taken = sends;
    assign b_ready = 1'b1;
    always_ff @(posedge clk) begin
        if (request && accepts) begin
            next <= address;
            left <= words;
        end else if (asks) begin
            aw_address <= next;
            aw_length <= 8'(burst - 9'd1);
            next <= next + {51'd0, burst, 4'd0};
            left <= left - 20'(burst);
        end
        beats <= asks ? burst : beats - 9'(sends);
        aw_valid <= asks || (aw_valid && !aw_ready);
        under_way <= under_way + 4'(asks) - 4'(b_valid);
        if (reset) begin
            left <= 20'd0;
            beats <= 9'd0;
            aw_valid <= 1'b0;
            under_way <= 4'd0;
        end
    end
endmodule

// An AXI4 read master: BEATS of one run of memory as a stream. Bursts end at 4 KiB, have at most 256 beats, and OUTSTANDING of
// them are under way at most. A burst is asked for when its data have a place in the FIFO, so that R never waits.
module fastcar_axi_read #(
    parameter int BITS = 128,
    parameter int WORDS = 1536,  // of the FIFO
    parameter int OUTSTANDING = 4,
    localparam int BYTES = BITS / 8,
    localparam int PAGE = 4096 / BYTES > 256 ? 256 : 4096 / BYTES
) (
    input logic clk,
    input logic reset,
    input logic start,
    input logic [63:0] address,  // of a whole beat
    input logic [31:0] beats,
    output logic ar_valid,
    input logic ar_ready,
    output logic [63:0] ar_address,
    output logic [7:0] ar_length,
    input logic r_valid,
    output logic r_ready,
    input logic [BITS-1:0] r_data,
    input logic r_last,
    output logic valid,
    input logic taken,
    output logic [BITS-1:0] data
);
    localparam int PAGE_BITS = $clog2(PAGE), COUNT_BITS = $clog2(WORDS + 1);
    logic [63:0] next;
    logic [31:0] left;
    logic [COUNT_BITS-1:0] room;  // words of the FIFO that no burst has taken
    logic [$clog2(OUTSTANDING+1)-1:0] under_way;
    logic [PAGE_BITS:0] length;
    // As far as the next multiple of a page.
    wire [PAGE_BITS:0] to_page = (PAGE_BITS + 1)'(PAGE) - {1'b0, next[$clog2(BYTES)+:PAGE_BITS]};
    wire asked = ar_valid && ar_ready;
    wire arrived = r_valid && r_ready && r_last;
    wire leaves = valid && taken;
    wire [PAGE_BITS:0] burst = left < 32'(to_page) ? left[PAGE_BITS:0] : to_page;
    wire may_ask = left != 0 && 32'(under_way) < OUTSTANDING && 32'(room) >= 32'(burst);
    wire asks = may_ask && !ar_valid && !start;
    assign r_ready = 1'b1;
    assign ar_length = 8'(length - 1'b1);
    always_ff @(posedge clk) begin
        if (start) begin
            next <= address;
            left <= beats;
        end else if (asks) begin
            ar_address <= next;
            length <= burst;
            next <= next + 64'(burst) * 64'(BYTES);
            left <= left - 32'(burst);
        end
        ar_valid <= asks || (ar_valid && !ar_ready);
        under_way <= under_way + $bits(under_way)'(asks) - $bits(under_way)'(arrived);
        room <= room - (asks ? COUNT_BITS'(burst) : COUNT_BITS'(0)) + COUNT_BITS'(leaves);
        if (reset) begin
            left <= 32'd0;
            ar_valid <= 1'b0;
            under_way <= 0;
            room <= COUNT_BITS'(WORDS);
        end
    end
    wire [COUNT_BITS-1:0] count;
    fastcar_fifo #(.BITS(BITS), .WORDS(WORDS)) fifo (
        .clk, .reset, .put(r_valid), .in(r_data), .count, .valid, .taken, .out(data)
    );
endmodule

// Which copy of a block its writer fills and its reader has (a PIPO of Vitis HLS). A writer claims a copy that is free and
// posts it full; a reader takes a full one and frees it.
module fastcar_blocks #(
    parameter int COPIES = 2
) (
    input logic clk,
    input logic reset,
    input logic claim,
    input logic post,
    input logic take,
    input logic free,
    output logic writable,
    output logic readable,
    output logic [1:0] write_copy,
    output logic [1:0] read_copy
);
    logic [1:0] empty, full;
    assign writable = empty != 0;
    assign readable = full != 0;
    always_ff @(posedge clk) begin
        empty <= empty - 2'(claim) + 2'(free);
        full <= full - 2'(take) + 2'(post);
        if (post) write_copy <= write_copy == 2'(COPIES - 1) ? 2'd0 : write_copy + 2'd1;
        if (free) read_copy <= read_copy == 2'(COPIES - 1) ? 2'd0 : read_copy + 2'd1;
        if (reset) begin
            empty <= 2'(COPIES);
            full <= 2'd0;
            write_copy <= 2'd0;
            read_copy <= 2'd0;
        end
    end
endmodule

// Process write_rows: the words of every tile and row go to their place in memory. A row that does not compute is not written.
module fastcar_write_rows #(
    parameter int ROWS = 1
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic [ROWS-1:0] computing,
    input logic [19:0] whole,
    input logic [19:0] result_words,
    input logic [63:0] address,
    output logic busy,
    input logic put,
    input logic [127:0] word,
    output logic room,
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
    localparam int WAITING = 16, ROW_BITS = ROWS > 1 ? $clog2(ROWS) : 1;
    logic [19:0] tiles_left, left, row;
    logic [63:0] tile_at, row_at;
    wire idle, accepts, valid, taken;
    wire [127:0] data;
    wire [4:0] count;
    wire last_row = row == 20'(ROWS - 1);
    wire computes = computing[ROW_BITS'(row)];
    wire request = tiles_left != 0 && computes;
    wire goes_on = tiles_left != 0 && (!computes || accepts);
    assign room = count <= 5'(WAITING - 4);
    assign busy = tiles_left != 0 || !idle;
    always_ff @(posedge clk) begin
        if (go) begin
            tiles_left <= tiles;
            left <= result_words;
            row <= 20'd0;
            tile_at <= address;
            row_at <= address;
        end else if (goes_on) begin
            row <= last_row ? 20'd0 : row + 20'd1;
            row_at <= last_row ? tile_at + {40'd0, whole, 4'd0} : row_at + {40'd0, result_words, 4'd0};
            if (last_row) begin
                tiles_left <= tiles_left - 20'd1;
                left <= left - whole;
                tile_at <= tile_at + {40'd0, whole, 4'd0};
            end
        end
        if (reset) tiles_left <= 20'd0;
    end
    fastcar_fifo #(.BITS(128), .WORDS(WAITING)) fifo (
        .clk, .reset, .put, .in(word), .count, .valid, .taken, .out(data)
    );
    fastcar_axi_write writer (
        .clk, .reset, .request, .accepts, .address(row_at), .words(left < whole ? left : whole), .idle, .valid, .taken, .data,
        .aw_valid, .aw_ready, .aw_address, .aw_length, .w_valid, .w_ready, .w_data, .w_last, .b_valid, .b_ready
    );
endmodule

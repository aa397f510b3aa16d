// Processes read_rows and load_rows: the rows of x that compute, one after another, each to its core and pass.
module fastcar_read_rows #(
    parameter int ROWS = 1,
    parameter int CORES = 1,
    parameter int ROW_WORDS = 75  // of a row's buffer
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [ROWS-1:0] computing,
    input logic [19:0] row_words,
    input logic [63:0] address,
    output logic busy,
    output logic done,
    output logic ar_valid,
    input logic ar_ready,
    output logic [63:0] ar_address,
    output logic [7:0] ar_length,
    input logic r_valid,
    output logic r_ready,
    input logic [127:0] r_data,
    input logic r_last,
    output logic [CORES-1:0] write,
    output logic [19:0] write_at,
    output logic [127:0] word
);
    localparam int ROW_BITS = ROWS > 1 ? $clog2(ROWS) : 1;
    logic [19:0] row, k, core, base;
    logic [63:0] row_at;
    logic reads, loads;
    wire valid;
    wire computes = computing[ROW_BITS'(row)];
    wire last_row = row == 20'(ROWS - 1);
    wire last_word = k == row_words - 20'd1;
    wire start = reads && !loads && computes;
    wire row_done = reads && (loads ? valid && last_word : !computes);
    assign busy = reads;
    assign done = row_done && last_row;
    assign write_at = base + k;
    always_comb for (int c = 0; c < CORES; c++) write[c] = loads && valid && core == 20'(c);
    always_ff @(posedge clk) begin
        if (go) begin
            row <= 20'd0;
            core <= 20'd0;
            base <= 20'd0;
            k <= 20'd0;
            row_at <= address;
        end else if (row_done) begin
            row <= row + 20'd1;
            k <= 20'd0;
            row_at <= row_at + {40'd0, row_words, 4'd0};
            if (loads) core <= core == 20'(CORES - 1) ? 20'd0 : core + 20'd1;
            if (loads && core == 20'(CORES - 1)) base <= base + 20'(ROW_WORDS);
        end else if (loads && valid) begin
            k <= k + 20'd1;
        end
        reads <= !reset && (go || (reads && !done));
        loads <= !reset && (start || (loads && !row_done));
    end
    fastcar_axi_read #(.BITS(128), .WORDS(1024)) reader (
        .clk, .reset, .start, .address(row_at), .beats(32'(row_words)), .ar_valid, .ar_ready, .ar_address, .ar_length, .r_valid,
        .r_ready, .r_data, .r_last, .valid, .taken(loads), .data(word)
    );
endmodule

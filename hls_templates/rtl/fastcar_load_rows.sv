// Process load_rows: a row after another from the stream, the i-th one to core i mod CORES in pass i div CORES.
module fastcar_load_rows #(
    parameter int CORES = 1,
    parameter int ROW_WORDS = 75  // of a row's buffer
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] rows,
    input logic [19:0] row_words,
    output logic busy,
    output logic done,
    input logic valid,
    output logic [CORES-1:0] write,
    output logic [19:0] write_at
);
    logic [19:0] left, k, core, base;
    wire last_word = valid && k == row_words - 20'd1;
    wire last_core = core == 20'(CORES - 1);
    assign busy = left != 0;
    assign done = left == 20'd1 && last_word;
    assign write_at = base + k;
    always_comb for (int c = 0; c < CORES; c++) write[c] = busy && valid && core == 20'(c);
    always_ff @(posedge clk) begin
        if (go) begin
            left <= rows;
            core <= 20'd0;
            base <= 20'd0;
            k <= 20'd0;
        end else if (busy && valid) begin
            k <= last_word ? 20'd0 : k + 20'd1;
            left <= left - 20'(last_word);
            if (last_word) core <= last_core ? 20'd0 : core + 20'd1;
            if (last_word && last_core) base <= base + 20'(ROW_WORDS);
        end
        if (reset) left <= 20'd0;
    end
endmodule

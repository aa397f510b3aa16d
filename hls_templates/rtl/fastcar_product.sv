// Calls of the engine, one after another: a call and its rows come by stream, the rows are quantised, the weight stream meets them
// tile by tile, and words of the result leave by stream. An MLP has two products: neurons of the first replace the rows of x, and are
// quantised for the last. `start` begins to serve; the call without products ends it (`done`).
//
// The design's sizes and the first product are in fastcar_rtl_config.svh. The last product comes as plain scalars, as
// `send_call` of fastcar_engine_processes.hpp derives them, each in 32 bits of the call's words.
//
// AXI port a of weights begins at weights_address[a]; it carries AXI_WORDS weight ports, word by word.
`include "fastcar_rtl_config.svh"
module fastcar_product #(
    parameter int PORTS = `FASTCAR_PORTS,
    parameter int AXI_WORDS = `FASTCAR_AXI_WORDS,
    parameter int ROWS = `FASTCAR_ROWS,
    parameter int CORES = `FASTCAR_CORES,
    parameter int WEIGHT_BITS = `FASTCAR_WEIGHT_BITS,
    parameter int INPUTS = `FASTCAR_MAX_INPUTS,
    parameter int CHANNEL_WORDS = `FASTCAR_MAX_CHANNEL_WORDS,
    parameter int TILE = `FASTCAR_MAX_TILE,
    parameter int TILE_WORDS = `FASTCAR_MAX_TILE_WORDS,
    parameter int TILE_SUMS = `FASTCAR_MAX_TILE_SUMS,
    parameter int SCALE_WORDS = `FASTCAR_MAX_SCALE_WORDS,
    parameter int FIFO_WORDS = `FASTCAR_FIFO_WORDS,
    parameter bit GATED = `FASTCAR_GATED,
    localparam int AXI = PORTS / AXI_WORDS
) (
    input logic clk,
    input logic reset,
    input logic start,
    output logic done,
    input logic [AXI*64-1:0] weights_address,
    input logic calls_tvalid,
    output logic calls_tready,
    input logic [127:0] calls_tdata,
    output logic results_tvalid,
    input logic results_tready,
    output logic [127:0] results_tdata,
    // Ports of weights.
    output logic [AXI-1:0] arvalid,
    input logic [AXI-1:0] arready,
    output logic [AXI*64-1:0] araddr,
    output logic [AXI*8-1:0] arlen,
    input logic [AXI-1:0] rvalid,
    output logic [AXI-1:0] rready,
    input logic [AXI*128*AXI_WORDS-1:0] rdata,
    input logic [AXI-1:0] rlast
);
    localparam int LANES = 128 / WEIGHT_BITS, PASSES = (ROWS + CORES - 1) / CORES;
    localparam int PORT_LANES = WEIGHT_BITS == 4 ? (PORTS + 3) / 4 : 1, PORT_BLOCKS = (PORTS + PORT_LANES - 1) / PORT_LANES;
    localparam int ROW_WORDS = (INPUTS + 3) / 4, RESULT_WORDS = (TILE * PORTS + 3) / 4;
    // As many words as a port has under way, besides those that wait.
    localparam int READ_WORDS = FIFO_WORDS + 4 * (256 / AXI_WORDS);

    // Its words, in the order of `send_call`; the first one comes last to the low end. A row follows when all are there.
    localparam int CALL_WORDS = 5, SIZES = 13;
    logic [CALL_WORDS*128-1:0] call;
    logic [2:0] call_word;
    logic serves, works, begins;
    wire rows_busy, busy;
    wire takes_call = serves && !works && calls_tvalid;
    wire complete = takes_call && call_word == 3'(CALL_WORDS - 1);
    wire mlp = call[1];
    wire [19:0] rows = call[32+:20], passes = call[64+:20], result_words = call[96+:20];
    wire [31:0] first_beat = call[128+:32], beats = call[160+:32];
    wire [SIZES*20:0] last_product;
    for (genvar i = 0; i < SIZES; i++) begin : g_size
        assign last_product[SIZES*20-20*i-:20] = call[192+32*i+:20];
    end
    assign last_product[0] = call[192+32*SIZES];
    assign calls_tready = serves && (!works || rows_busy);
    assign done = takes_call && call_word == 3'd0 && calls_tdata[31:0] == 32'd0;
    always_ff @(posedge clk) begin
        if (takes_call) call <= {calls_tdata, call[CALL_WORDS*128-1:128]};
        call_word <= reset || start || complete ? 3'd0 : call_word + 3'(takes_call);
        serves <= !reset && (start || (serves && !done));
        begins <= complete;
        works <= !reset && (complete || (works && (begins || busy)));
    end

    // The product at hand.
    logic inner;  // the first of an MLP
    wire [19:0] inputs, channels, tiles, tile, sums, channel_words, scale_words, head_words, tile_words, tile_sums;
    wire [19:0] sum_words, scale_rows, chunk;
    wire bias, neurons_done;
    assign {inputs, channels, tiles, tile, sums, channel_words, scale_words, head_words, tile_words, tile_sums, sum_words, scale_rows,
            chunk, bias} = inner ? `FASTCAR_FIRST_PRODUCT : last_product;
    always_ff @(posedge clk) inner <= !reset && (begins ? mlp : inner && !neurons_done);

    // Rows in, quantised; then the tiles.
    wire rows_loaded, quantised, quantise_busy;
    wire [CORES-1:0] write_x, write_row_scale, write_row;
    wire [19:0] x_at, row_at;
    wire [4:0] row_scale_at;
    wire [31:0] row_scale;
    wire [CORES*LANES*8-1:0] row_values;
    wire [3:0] write_neuron;
    wire [19:0] neuron_at;
    wire [CORES*32-1:0] neurons;
    wire go = quantised, go_last = go && !inner;
    wire [19:0] whole = chunk >> 2;
    wire [19:0] stream_words = head_words + tile_words;
    wire fetch_busy, multiply_busy, scale_busy, finish_busy, send_busy;
    assign busy = rows_busy || quantise_busy || inner || go || fetch_busy || multiply_busy || scale_busy || finish_busy || send_busy;
    fastcar_load_rows #(.CORES(CORES), .ROW_WORDS(ROW_WORDS)) load_rows (
        .clk, .reset, .go(begins), .rows, .row_words((inputs + 20'd3) >> 2), .busy(rows_busy), .done(rows_loaded),
        .valid(calls_tvalid), .write(write_x), .write_at(x_at)
    );
    fastcar_quantize_rows #(
        .CORES(CORES), .PASSES(PASSES), .LANES(LANES), .ROW_WORDS(ROW_WORDS), .CHANNEL_WORDS(CHANNEL_WORDS)
    ) quantize_rows (
        .clk, .reset, .go(rows_loaded || neurons_done), .passes, .inputs, .channel_words, .busy(quantise_busy), .done(quantised),
        .write(write_x), .write_at(x_at), .word(calls_tdata), .write_neuron,
        .neuron_at, .neurons, .write_row_scale, .row_scale_at, .row_scale, .write_row, .row_at,
        .row_words(row_values)
    );

    // The weight stream.
    wire [PORTS-1:0] valid;
    wire [PORTS*128-1:0] stream;
    wire taken;
    for (genvar a = 0; a < AXI; a++) begin : g_axi
        wire beat_valid;
        fastcar_axi_read #(.BITS(128 * AXI_WORDS), .WORDS(READ_WORDS)) reader (
            .clk, .reset, .start(begins), .address(weights_address[64*a+:64] + 64'(first_beat) * 64'(16 * AXI_WORDS)), .beats,
            .ar_valid(arvalid[a]), .ar_ready(arready[a]), .ar_address(araddr[64*a+:64]),
            .ar_length(arlen[8*a+:8]), .r_valid(rvalid[a]), .r_ready(rready[a]),
            .r_data(rdata[128*AXI_WORDS*a+:128*AXI_WORDS]), .r_last(rlast[a]),
            .valid(beat_valid), .taken, .data(stream[128*AXI_WORDS*a+:128*AXI_WORDS])
        );
        assign valid[AXI_WORDS*a+:AXI_WORDS] = {AXI_WORDS{beat_valid}};
    end

    // Blocks between the processes of a tile: heads skip the multiplication and have three copies.
    wire fetch_begins, fetch_ends, multiply_begins, multiply_ends, scale_begins, scale_ends, finish_begins, finish_ends;
    wire send_begins, send_ends;
    wire head_writable, head_readable, tile_writable, tile_readable, sums_writable, sums_readable;
    wire values_writable, values_readable, results_writable, results_readable;
    wire [1:0] head_write, head_read, tile_write, tile_read, sums_write, sums_read, values_write, values_read;
    wire [1:0] results_write, results_read;
    fastcar_blocks #(.COPIES(3)) head_blocks (
        .clk, .reset, .claim(fetch_begins), .post(fetch_ends), .take(scale_begins), .free(scale_ends),
        .writable(head_writable), .readable(head_readable), .write_copy(head_write), .read_copy(head_read)
    );
    fastcar_blocks tile_blocks (
        .clk, .reset, .claim(fetch_begins), .post(fetch_ends), .take(multiply_begins), .free(multiply_ends),
        .writable(tile_writable), .readable(tile_readable), .write_copy(tile_write), .read_copy(tile_read)
    );
    fastcar_blocks sums_blocks (
        .clk, .reset, .claim(multiply_begins), .post(multiply_ends), .take(scale_begins), .free(scale_ends),
        .writable(sums_writable), .readable(sums_readable), .write_copy(sums_write), .read_copy(sums_read)
    );
    fastcar_blocks values_blocks (
        .clk, .reset, .claim(scale_begins), .post(scale_ends), .take(finish_begins), .free(finish_ends),
        .writable(values_writable), .readable(values_readable), .write_copy(values_write), .read_copy(values_read)
    );
    fastcar_blocks results_blocks (
        .clk, .reset, .claim(finish_begins && !inner), .post(finish_ends && !inner), .take(send_begins), .free(send_ends),
        .writable(results_writable), .readable(results_readable), .write_copy(results_write), .read_copy(results_read)
    );

    wire to_scales, to_biases, to_tile, write_sums, write_values, write_results, put, room;
    wire [19:0] fetched_at, sum_at, value_at, result_at;
    wire [PORTS*128-1:0] fetched;
    wire [CORES*PORTS*32-1:0] sum_values;
    wire [CORES*PORT_LANES*32-1:0] values;
    wire [CORES*128-1:0] results;
    wire [127:0] sent;
    fastcar_fetch #(.PORTS(PORTS)) fetch (
        .clk, .reset, .go, .tiles, .scale_words, .head_words, .stream_words, .blocks_ready(head_writable && tile_writable),
        .begins(fetch_begins), .ends(fetch_ends), .busy(fetch_busy), .valid, .words(stream), .taken,
        .to_scales, .to_biases, .to_tile, .at(fetched_at), .data(fetched)
    );
    fastcar_multiply #(
        .PORTS(PORTS), .CORES(CORES), .PASSES(PASSES), .WEIGHT_BITS(WEIGHT_BITS), .TILE_WORDS(TILE_WORDS),
        .CHANNEL_WORDS(CHANNEL_WORDS), .TILE_STYLE(`FASTCAR_TILE_STYLE)
    ) multiply (
        .clk, .reset, .go, .tiles, .passes, .tile_words, .channel_words, .sum_words,
        .blocks_ready(tile_readable && sums_writable), .begins(multiply_begins), .ends(multiply_ends), .busy(multiply_busy),
        .write_tile(to_tile), .write_copy(tile_write), .read_copy(tile_read), .write_at(fetched_at), .words(fetched),
        .write_row, .row_at, .row_words(row_values), .write_sums, .sum_at, .sums(sum_values)
    );
    fastcar_scale #(
        .PORTS(PORTS), .CORES(CORES), .PASSES(PASSES), .WEIGHT_BITS(WEIGHT_BITS), .TILE(TILE), .TILE_SUMS(TILE_SUMS),
        .SCALE_WORDS(SCALE_WORDS)
    ) scale (
        .clk, .reset, .go, .tiles, .passes, .tile, .rows(scale_rows), .sums, .tile_sums, .bias,
        .blocks_ready(head_readable && sums_readable && values_writable),
        .begins(scale_begins), .ends(scale_ends), .busy(scale_busy), .write_scales(to_scales), .write_biases(to_biases),
        .head_write_copy(head_write), .head_read_copy(head_read), .head_at(fetched_at), .words(fetched), .write_sums,
        .sums_write_copy(sums_write), .sums_read_copy(sums_read), .sum_at, .sum_words(sum_values), .write_row_scale,
        .row_scale_at, .row_scale, .write_values, .value_at, .values
    );
    fastcar_finish #(
        .PORTS(PORTS), .CORES(CORES), .PASSES(PASSES), .TILE(TILE), .PORT_LANES(PORT_LANES), .PORT_BLOCKS(PORT_BLOCKS),
        .RESULT_WORDS(RESULT_WORDS), .ROW_WORDS(ROW_WORDS), .GATED(GATED)
    ) finish (
        .clk, .reset, .go, .inner, .tiles, .passes, .chunk, .channels, .blocks_ready(values_readable && results_writable),
        .begins(finish_begins), .ends(finish_ends), .busy(finish_busy), .write_values, .write_copy(values_write),
        .read_copy(values_read), .value_at, .values, .write_results, .result_at, .results, .write_neuron, .neuron_at, .neurons,
        .neurons_done
    );
    fastcar_send #(.CORES(CORES), .PASSES(PASSES), .RESULT_WORDS(RESULT_WORDS)) send (
        .clk, .reset, .go(go_last), .tiles, .rows, .whole, .result_words, .blocks_ready(results_readable), .begins(send_begins),
        .ends(send_ends), .busy(send_busy), .write_results, .write_copy(results_write), .read_copy(results_read), .result_at,
        .results, .room, .put, .word(sent)
    );
    localparam int WAITING = 16;
    wire [4:0] waiting;
    assign room = waiting <= 5'(WAITING - 4);
    fastcar_fifo #(.BITS(128), .WORDS(WAITING)) fifo (
        .clk, .reset, .put, .in(sent), .count(waiting), .valid(results_tvalid), .taken(results_tready), .out(results_tdata)
    );
endmodule

// A linear or an MLP from memory to memory: rows of x are read and quantised, the weight stream meets them tile by tile, and the
// rows of the result are written. An MLP has two products: neurons of the first replace the rows of x, and are quantised for the last.
//
// The design's sizes and the first product are in fastcar_rtl_config.svh. The last product comes as plain scalars, as
// `run_product` of fastcar_engine_processes.hpp derives them, which keep their values while `busy`.
//
// AXI port a of weights begins at weights_address[a]; it carries AXI_WORDS weight ports, word by word.
`include "fastcar_rtl_config.svh"
module fastcar_engine #(
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
    output logic busy,
    output logic fetching,  // the tiles have begun
    // The call.
    input logic mlp,
    input logic [ROWS-1:0] computing,
    input logic [19:0] rows,
    input logic [19:0] passes,
    input logic [19:0] row_words,
    input logic [19:0] result_words,
    // Its last product.
    input logic [19:0] last_inputs,
    input logic [19:0] last_channels,
    input logic [19:0] last_tiles,
    input logic [19:0] last_tile,
    input logic [19:0] last_sums,
    input logic [19:0] last_channel_words,
    input logic [19:0] last_scale_words,
    input logic [19:0] last_head_words,
    input logic [19:0] last_tile_words,
    input logic [19:0] last_tile_sums,
    input logic [19:0] last_sum_words,
    input logic [19:0] last_scale_rows,
    input logic [19:0] last_chunk,
    input logic last_bias,
    input logic [31:0] words,
    input logic [AXI*64-1:0] weights_address,
    input logic [63:0] input_address,
    input logic [63:0] output_address,
    // Ports of weights.
    output logic [AXI-1:0] w_ar_valid,
    input logic [AXI-1:0] w_ar_ready,
    output logic [AXI*64-1:0] w_ar_address,
    output logic [AXI*8-1:0] w_ar_length,
    input logic [AXI-1:0] w_r_valid,
    output logic [AXI-1:0] w_r_ready,
    input logic [AXI*128*AXI_WORDS-1:0] w_r_data,
    input logic [AXI-1:0] w_r_last,
    // The port of x.
    output logic x_ar_valid,
    input logic x_ar_ready,
    output logic [63:0] x_ar_address,
    output logic [7:0] x_ar_length,
    input logic x_r_valid,
    output logic x_r_ready,
    input logic [127:0] x_r_data,
    input logic x_r_last,
    // The port of the result.
    output logic y_aw_valid,
    input logic y_aw_ready,
    output logic [63:0] y_aw_address,
    output logic [7:0] y_aw_length,
    output logic y_w_valid,
    input logic y_w_ready,
    output logic [127:0] y_w_data,
    output logic y_w_last,
    input logic y_b_valid,
    output logic y_b_ready
);
    localparam int LANES = 128 / WEIGHT_BITS, PASSES = (ROWS + CORES - 1) / CORES;
    localparam int PORT_LANES = WEIGHT_BITS == 4 ? (PORTS + 3) / 4 : 1, PORT_BLOCKS = (PORTS + PORT_LANES - 1) / PORT_LANES;
    localparam int ROW_WORDS = (INPUTS + 3) / 4, RESULT_WORDS = (TILE * PORTS + 3) / 4;
    // As many words as a port has under way, besides those that wait.
    localparam int READ_WORDS = FIFO_WORDS + 4 * (256 / AXI_WORDS);

    // The product at hand.
    logic inner;  // the first of an MLP
    wire [19:0] inputs, channels, tiles, tile, sums, channel_words, scale_words, head_words, tile_words, tile_sums;
    wire [19:0] sum_words, scale_rows, chunk;
    wire bias, neurons_done;
    assign {inputs, channels, tiles, tile, sums, channel_words, scale_words, head_words, tile_words, tile_sums, sum_words, scale_rows,
            chunk, bias} = inner ? `FASTCAR_FIRST_PRODUCT :
           {last_inputs, last_channels, last_tiles, last_tile, last_sums, last_channel_words, last_scale_words, last_head_words,
            last_tile_words, last_tile_sums, last_sum_words, last_scale_rows, last_chunk, last_bias};
    always_ff @(posedge clk) inner <= !reset && (start ? mlp : inner && !neurons_done);

    // Rows in, quantised; then the tiles.
    wire rows_read, rows_busy, quantised, quantise_busy, write_busy;
    wire [CORES-1:0] write_x, write_row_scale, write_row;
    wire [19:0] x_at, row_at;
    wire [127:0] x_word;
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
    assign fetching = fetch_busy;
    assign busy = rows_busy || quantise_busy || inner || go || fetch_busy || multiply_busy || scale_busy || finish_busy || send_busy ||
                  write_busy;
    fastcar_read_rows #(.ROWS(ROWS), .CORES(CORES), .ROW_WORDS(ROW_WORDS)) read_rows (
        .clk, .reset, .go(start), .computing, .row_words, .address(input_address), .busy(rows_busy), .done(rows_read),
        .ar_valid(x_ar_valid), .ar_ready(x_ar_ready), .ar_address(x_ar_address), .ar_length(x_ar_length),
        .r_valid(x_r_valid), .r_ready(x_r_ready), .r_data(x_r_data), .r_last(x_r_last),
        .write(write_x), .write_at(x_at), .word(x_word)
    );
    fastcar_quantize_rows #(
        .CORES(CORES), .PASSES(PASSES), .LANES(LANES), .ROW_WORDS(ROW_WORDS), .CHANNEL_WORDS(CHANNEL_WORDS)
    ) quantize_rows (
        .clk, .reset, .go(rows_read || neurons_done), .passes, .inputs, .channel_words, .busy(quantise_busy), .done(quantised),
        .write(write_x), .write_at(x_at), .word(x_word), .write_neuron,
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
            .clk, .reset, .start, .address(weights_address[64*a+:64]), .beats(words),
            .ar_valid(w_ar_valid[a]), .ar_ready(w_ar_ready[a]), .ar_address(w_ar_address[64*a+:64]),
            .ar_length(w_ar_length[8*a+:8]), .r_valid(w_r_valid[a]), .r_ready(w_r_ready[a]),
            .r_data(w_r_data[128*AXI_WORDS*a+:128*AXI_WORDS]), .r_last(w_r_last[a]),
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
        .CHANNEL_WORDS(CHANNEL_WORDS)
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
    fastcar_write_rows #(.ROWS(ROWS)) write_rows (
        .clk, .reset, .go(go_last), .tiles, .computing, .whole, .result_words, .address(output_address), .busy(write_busy), .put,
        .word(sent), .room, .aw_valid(y_aw_valid), .aw_ready(y_aw_ready), .aw_address(y_aw_address), .aw_length(y_aw_length),
        .w_valid(y_w_valid), .w_ready(y_w_ready), .w_data(y_w_data), .w_last(y_w_last), .b_valid(y_b_valid),
        .b_ready(y_b_ready)
    );
endmodule

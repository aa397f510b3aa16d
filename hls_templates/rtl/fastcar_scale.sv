// Process scale_tile: the sums of a tile become float32 values, all cores side by side, PORT_LANES ports a clock. Of w4a8
// groups of a channel are added in ascending order; a total is read again after at least SCALE_ROWS * PORT_BLOCKS clocks.
module fastcar_scale #(
    parameter int PORTS = 4,
    parameter int CORES = 1,
    parameter int PASSES = 1,
    parameter int WEIGHT_BITS = 4,
    parameter int TILE = 2,
    parameter int TILE_SUMS = 6,
    parameter int SCALE_WORDS = 2,
    localparam int SUMS = PASSES * TILE_SUMS,
    localparam int PORT_LANES = WEIGHT_BITS == 4 ? (PORTS + 3) / 4 : 1,
    localparam int PORT_BLOCKS = (PORTS + PORT_LANES - 1) / PORT_LANES,
    localparam int BIAS_WORDS = (TILE + 3) / 4
) (
    input logic clk,
    input logic reset,
    input logic go,
    input logic [19:0] tiles,
    input logic [19:0] passes,
    input logic [19:0] tile,
    input logic [19:0] rows,
    input logic [19:0] sums,
    input logic [19:0] tile_sums,
    input logic bias,
    input logic blocks_ready,
    output logic begins,
    output logic ends,
    output logic busy,
    // The head, written by fetch; sums, written by the array; the scales of the rows.
    input logic write_scales,
    input logic write_biases,
    input logic [1:0] head_write_copy,
    input logic [1:0] head_read_copy,
    input logic [19:0] head_at,
    input logic [PORTS*128-1:0] words,
    input logic write_sums,
    input logic [1:0] sums_write_copy,
    input logic [1:0] sums_read_copy,
    input logic [19:0] sum_at,
    input logic [CORES*PORTS*32-1:0] sum_words,
    input logic [CORES-1:0] write_row_scale,
    input logic [4:0] row_scale_at,
    input logic [31:0] row_scale,
    // Values of every core and lane of a block of ports.
    output logic write_values,
    output logic [19:0] value_at,
    output logic [CORES*PORT_LANES*32-1:0] values
);
    localparam bit GROUPED = WEIGHT_BITS == 4;
    localparam int SCALE_LANES = GROUPED ? 8 : 4;
    // Clocks from a step's place to: its words; its part, or its value before the bias; the total; the value.
    localparam int WORD = 2, PART = WORD + 8, TOTAL = PART + 6, SCALED = GROUPED ? TOTAL + 4 : PART, VALUE = SCALED + 6;
    localparam int SCALE_BITS = $clog2(3 * SCALE_WORDS), BIAS_BITS = $clog2(3 * BIAS_WORDS), SUM_BITS = $clog2(2 * SUMS);
    localparam int PASS_BITS = PASSES > 1 ? $clog2(PASSES) : 1;
    localparam int TOTAL_BITS = $clog2(TILE * PORT_BLOCKS + 1);

    // A product's sizes stay from `go` on, two clocks before the first step.
    logic [19:0] block, row, group, sum, place, pass, sums_before, values_before, end_row, end_group, end_pass;
    wire last_block = block == 20'(PORT_BLOCKS - 1);
    wire last_row = last_block && row == end_row;
    wire last_group = group == end_group;
    wire last_of_pass = last_row && last_group;
    wire step;
    fastcar_stage #(.DEPTH(VALUE)) stage (
        .clk, .reset, .go, .tiles, .ready(blocks_ready), .advance(1'b1), .last(last_of_pass && pass == end_pass),
        .begins, .step, .ends, .busy
    );
    always_ff @(posedge clk) begin
        {end_row, end_group, end_pass} <= {rows - 20'd1, sums - 20'd1, passes - 20'd1};
        if (begins) begin
            {block, row, group, sum, place, pass, sums_before, values_before} <= 160'd0;
        end else if (step) begin
            block <= last_block ? 20'd0 : block + 20'd1;
            row <= last_row ? 20'd0 : last_block ? row + 20'd1 : row;
            group <= last_of_pass ? 20'd0 : last_row ? group + 20'd1 : group;
            sum <= last_row ? 20'd0 : last_block ? sum + sums : sum;
            place <= last_row ? 20'd0 : place + 20'd1;
            pass <= last_of_pass ? pass + 20'd1 : pass;
            sums_before <= last_of_pass ? sums_before + tile_sums : sums_before;
            values_before <= last_of_pass ? values_before + 20'(PORT_BLOCKS) * tile : values_before;
        end
    end

    // What a step needs, where it needs it.
    wire [19:0] at = sum + group;
    wire real_row = row < tile;
    wire [2:0] lane_word;
    wire [1:0] row_word;
    wire [19:0] block_word, pass_scale, place_part, place_total;
    wire first_part, adds, added;
    fastcar_delay #(.BITS(25), .CLOCKS(WORD)) d_word (.clk, .in({at[2:0], row[1:0], block}), .out({lane_word, row_word, block_word}));
    fastcar_delay #(.BITS(20), .CLOCKS((GROUPED ? TOTAL : WORD) - 1)) d_pass (.clk, .in(pass), .out(pass_scale));
    fastcar_delay #(.BITS(1), .CLOCKS(PART)) d_first (.clk, .in(group == 20'd0), .out(first_part));
    fastcar_delay #(.BITS(21), .CLOCKS(PART - 1)) d_part (.clk, .in({step && real_row, place}), .out({adds, place_part}));
    fastcar_delay #(.BITS(21), .CLOCKS(7)) d_total (.clk, .in({adds, place_part}), .out({added, place_total}));
    fastcar_delay #(.BITS(21), .CLOCKS(VALUE)) d_value (
        .clk, .in({step && real_row && last_group, values_before + place}), .out({write_values, value_at})
    );

    function automatic logic [19:0] copy_at(input logic [1:0] copy, input int size);
        copy_at = copy == 2'd0 ? 20'd0 : copy == 2'd1 ? 20'(size) : 20'(2 * size);
    endfunction

    wire [PORTS*128-1:0] scale_words, bias_words;
    for (genvar p = 0; p < PORTS; p++) begin : g_head
        fastcar_ram #(.BITS(128), .WORDS(3 * SCALE_WORDS)) scales (
            .clk, .write(write_scales), .write_at(SCALE_BITS'(head_at + copy_at(head_write_copy, SCALE_WORDS))),
            .data(words[128*p+:128]),
            .read_at(SCALE_BITS'(at / 20'(SCALE_LANES) + copy_at(head_read_copy, SCALE_WORDS))), .found(scale_words[128*p+:128])
        );
        fastcar_ram #(.BITS(128), .WORDS(3 * BIAS_WORDS)) biases (
            .clk, .write(write_biases), .write_at(BIAS_BITS'(head_at + copy_at(head_write_copy, BIAS_WORDS))),
            .data(words[128*p+:128]),
            .read_at(BIAS_BITS'(row / 20'd4 + copy_at(head_read_copy, BIAS_WORDS))), .found(bias_words[128*p+:128])
        );
    end

    for (genvar l = 0; l < PORT_LANES; l++) begin : g_lane
        // The words of the block's port.
        logic [127:0] scales, biases;
        always_comb begin
            scales = 128'd0;
            biases = 128'd0;
            for (int b = 0; b < PORT_BLOCKS; b++) begin
                if (block_word == 20'(b) && b * PORT_LANES + l < PORTS) begin
                    scales = scale_words[128*((b*PORT_LANES+l)%PORTS)+:128];
                    biases = bias_words[128*((b*PORT_LANES+l)%PORTS)+:128];
                end
            end
        end
        // A float16 that is positive and normal, or the zero of padding.
        wire [31:0] half = {3'b000, scales[16*lane_word+:16], 13'd0} + {9'd112, 23'd0};
        wire [31:0] scale = GROUPED ? half : scales[32*lane_word[1:0]+:32];
        wire [31:0] bias_value;
        fastcar_delay #(.BITS(32), .CLOCKS(SCALED - WORD)) d_bias (
            .clk, .in(bias ? biases[32*row_word+:32] : 32'h80000000), .out(bias_value)
        );
        for (genvar c = 0; c < CORES; c++) begin : g_core
            wire [PORT_BLOCKS*32-1:0] sums_of;
            for (genvar b = 0; b < PORT_BLOCKS; b++) begin : g_port
                if (b * PORT_LANES + l < PORTS) begin : g_sums
                    fastcar_ram #(.BITS(32), .WORDS(2 * SUMS)) sums_ram (
                        .clk, .write(write_sums), .write_at(SUM_BITS'(sum_at + copy_at(sums_write_copy, SUMS))),
                        .data(sum_words[32*(c*PORTS+b*PORT_LANES+l)+:32]),
                        .read_at(SUM_BITS'(sums_before + at + copy_at(sums_read_copy, SUMS))), .found(sums_of[32*b+:32])
                    );
                end else begin : g_none
                    assign sums_of[32*b+:32] = 32'd0;
                end
            end
            logic [31:0] sum_found;
            always_comb begin
                sum_found = 32'd0;
                for (int b = 0; b < PORT_BLOCKS; b++) if (block_word == 20'(b)) sum_found = sums_of[32*b+:32];
            end
            logic [31:0] own_scale, row_scales[0:PASSES-1];
            always_ff @(posedge clk) begin
                if (write_row_scale[c]) row_scales[PASS_BITS'(row_scale_at)] <= row_scale;
                own_scale <= row_scales[PASS_BITS'(pass_scale)];
            end

            wire [31:0] number, part, scaled;
            fastcar_float_of_int convert (.clk, .value(sum_found), .number);
            if (GROUPED) begin : g_groups
                wire [31:0] late_scale, so_far, total;
                fastcar_delay #(.BITS(32), .CLOCKS(4)) d_scale (.clk, .in(scale), .out(late_scale));
                fastcar_float_multiply parts (.clk, .left(number), .right(late_scale), .product(part));
                fastcar_ram #(.BITS(32), .WORDS(TILE * PORT_BLOCKS + 1), .LATENCY(1)) totals (
                    .clk, .write(added), .write_at(TOTAL_BITS'(place_total)), .data(total),
                    .read_at(TOTAL_BITS'(place_part)), .found(so_far)
                );
                // -0 plus a part is the part.
                fastcar_float_add add (.clk, .left(first_part ? 32'h80000000 : so_far), .right(part), .sum(total));
                fastcar_float_multiply scale_row (.clk, .left(total), .right(own_scale), .product(scaled));
            end else begin : g_channels
                wire [31:0] both;
                fastcar_float_multiply scales_of (.clk, .left(own_scale), .right(scale), .product(both));
                fastcar_float_multiply parts (.clk, .left(number), .right(both), .product(part));
                assign scaled = part;
            end
            fastcar_float_add add_bias (.clk, .left(scaled), .right(bias_value), .sum(values[32*(PORT_LANES*c+l)+:32]));
        end
    end
endmodule
